"""Arguments with a size that is 1 beside one that is not: broadcast as in PyTorch, whichever call comes first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST
from ort_zero.ortmodule.runtime.export_cache import size_guards
from ort_zero.ortmodule.wrap import wrap_model


class Two(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table, self.own = nn.Embedding(10, 4), nn.Parameter(torch.randn(3, 4))
        self.function = function

    def forward(self, x, y):
        return self.function(self, x, y)


def compare(function, calls):
    """Return the runtime of a module that gives PyTorch's results and gradients, and its number of exports by call."""
    reference = Two(function)
    runtime, ours = wrap_model(copy.deepcopy(reference), config.OrtModuleConfig(), stage=0)
    exports = []
    for given in calls:
        found = []
        for model in (ours, reference):
            model.zero_grad()
            result = model(*given)
            result.square().sum().backward()
            found.append([result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        exports.append(runtime.status()["graphs"]["training"]["exports"])
    assert runtime.status()["backend"] == "onnxruntime" and not runtime.status()["in_torch"]
    return runtime, exports


def rows(*numbers: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(number, 4) for number in numbers)


PROGRAMS = {
    "product": lambda m, x, y: m.first(x) * m.second(y),
    "where": lambda m, x, y: torch.where(y > 0, m.first(x), m.second(y)),
    # the gradient of the norm would be that of its first row alone
    "norm": lambda m, x, y: m.norm(m.second(y)) * m.first(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 2, 4, 3), (3, 1, 2, 4, 0)], ids=str)
def test_rows_of_which_one_may_be_alone(name, order):
    calls = [rows(3, 3), rows(1, 3), rows(3, 1), rows(1, 1), rows(2, 2)]
    _, exports = compare(PROGRAMS[name], [calls[i] for i in order])
    assert exports[-1] == 3  # equal, the one alone, the other alone


def test_positions_that_are_the_same_for_the_whole_batch():
    positions = torch.arange(5)[None]
    calls = [(torch.randn(b, 5, 4), positions.expand(n, 5)) for b, n in ((3, 1), (2, 1), (2, 2), (4, 4), (5, 1))]
    runtime, exports = compare(lambda m, x, y: m.first(x) + m.table(y), calls)
    assert exports == [1, 1, 2, 2, 2]
    assert runtime.status()["transitions"][1]["reasons"] == ["axis 0 of y: 1 -> 2"]


def test_why_equal_sizes_are_another_graph():
    runtime, _ = compare(PROGRAMS["product"], [rows(3, 3), rows(1, 3)])
    (reason,) = runtime.status()["transitions"][-1]["reasons"]
    assert reason == "sizes are no longer equal: axis 0 of y is 3, axis 0 of x is 1"


def test_rows_beside_a_weight_of_as_many():
    _, exports = compare(lambda m, x, y: m.first(x) * m.own + y.sum(), [rows(3, 2), rows(1, 2), rows(3, 5)])
    assert exports == [1, 2, 2]


def test_a_mask_that_is_reshaped_to_the_batch_size_of_another_argument():
    def masked(m, x, mask):
        return m.first(x) * (m.own.sum() * mask).view(x.shape[0], -1)[..., None]

    calls = [(torch.randn(a, length, 4), torch.randn(b, other)) for a, length, b, other in SIZES]
    runtime, exports = compare(masked, calls[:2])
    assert exports == [1, 1]
    assert not any(BROADCAST in str(node) for node in runtime.current(True).session.model.graph.node)
    runtime, exports = compare(masked, calls)
    assert exports == [1, 1, 2, 2, 2]
    reasons = runtime.status()["transitions"][1]["reasons"]
    assert "sizes are no longer equal: axis 0 of y is 1, axis 0 of x is 2" in reasons


SIZES = ((3, 5, 3, 5), (4, 2, 4, 2), (2, 5, 1, 10), (3, 5, 3, 1), (2, 6, 2, 6))
"""Sizes of a batch and of its mask: as many numbers in one row in the third, a single column in the fourth."""


def test_batched_products():
    calls = [(torch.randn(a, 4, 4), torch.randn(b, 4, 4)) for a, b in ((3, 3), (1, 3), (3, 1), (2, 2))]
    compare(lambda m, x, y: m.first(x) @ m.second(y), calls)


def test_sizes_that_never_meet_are_free():
    calls = [rows(3, 3), rows(1, 3), rows(5, 2), rows(2, 1)]
    _, exports = compare(lambda m, x, y: m.first(x).sum(0) + m.second(y).sum(0), calls)
    assert exports[-1] == 1


def test_what_the_export_cache_keeps_of_them():
    runtime, _ = compare(PROGRAMS["product"], [rows(1, 3), rows(3, 3)])
    for graph in runtime.current(True).known.export, *(g.known.export for g in runtime.modes[True].graphs):
        guard = graph.size_guard
        again = size_guards.read(size_guards.written(guard))
        assert again.relations == guard.relations and (guard.relations.equal or guard.relations.fixed)
