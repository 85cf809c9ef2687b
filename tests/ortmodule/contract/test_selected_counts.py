"""Operands whose numbers of elements depend on values: broadcast as in PyTorch whenever one of them is 1."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST
from ort_zero.ortmodule.wrap import wrap_model


class Selected(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.own = nn.Parameter(torch.randn(3, 4))
        self.function = function

    def forward(self, x, a, b):
        return self.function(self, self.first(x), self.second(x), a, b)


PROGRAMS = {
    "sum": lambda m, h, k, a, b: h[a] + 2 * k[b],
    "product": lambda m, h, k, a, b: h[a] * k[b],
    "quotient": lambda m, h, k, a, b: h[a.nonzero()[:, 0]] / (5 + k[b.nonzero()[:, 0]]),
    "larger": lambda m, h, k, a, b: torch.maximum(h[a], k[b]),
    "where": lambda m, h, k, a, b: torch.where(k[b] > 0, h[a], k[b]),
    "compared": lambda m, h, k, a, b: (h[a] > k[b]) * h[a],
    "both of them again": lambda m, h, k, a, b: m.norm(h[a] - k[b]) * h[a],
    "products of rows": lambda m, h, k, a, b: h[a][:, None, :] @ k[b][:, :, None],
    "with the mean": lambda m, h, k, a, b: (h[a] - k[b]) * h[a].sum(0, keepdim=True),
}


def gradients(model, *given):
    model.zero_grad()
    result = model(*given)
    result.square().sum().backward()
    return [result.detach(), *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]


def masks(*counts: int) -> list[torch.Tensor]:
    return [torch.arange(5) < count for count in counts]


def compare(function, all_counts):
    """Return the runtime of a module whose one graph gives PyTorch's gradients for each pair of counts."""
    reference = Selected(function)
    runtime, ours = wrap_model(copy.deepcopy(reference), config.OrtModuleConfig(), stage=0)
    x = torch.randn(5, 4)
    for counts in all_counts:
        found, wanted = (gradients(model, x, *masks(*counts)) for model in (ours, reference))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["graphs"]["training"]["exports"] == 1, status
    assert not status["in_torch"]
    return runtime


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_of_two_masks_that_were_equal_at_first(name):
    compare(PROGRAMS[name], [(3, 3), (1, 3), (3, 1), (2, 2), (0, 0), (0, 1), (1, 0), (1, 1)])


def test_a_selection_beside_a_weight_of_as_many_rows():
    compare(lambda m, h, k, a, b: h[a] * m.own + k[b].sum(), [(3, 1), (1, 2), (3, 5)])


def test_a_selection_that_is_expanded():
    compare(lambda m, h, k, a, b: h[a].expand(5, 4) * k + k[b].sum(), [(1, 1), (5, 1), (1, 3)])


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda m, h, k, a, b: h[a] * k[a] + m.norm(k[a]), 0),
        (lambda m, h, k, a, b: h[a.float() > 0] * k[a.float() > 0], 0),
        (lambda m, h, k, a, b: m.second(h[a]).relu() * 2, 0),
        (lambda m, h, k, a, b: h[a] * k[b], 2),
    ],
)
def test_only_what_may_differ_is_broadcast(function, count):
    runtime = compare(function, [(3, 3), (2, 2)])
    nodes = runtime.current(True).session.model.graph.node
    assert sum(BROADCAST in str(node) for node in nodes) == count


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h, k, a, b: nn.functional.normalize(h[a]) * k[b].sum(),
        lambda m, h, k, a, b: h / (2 + k[b].sum(0)) + h[a].sum(),
        lambda m, h, k, a, b: h[a].sum() / (1 + b.sum()) + (k / (1 + k.pow(2).sum(1, keepdim=True))).sum(),
        lambda m, h, k, a, b: (h[a].sum(0) / k[:, None]).sum() + k[b].sum() / (1 + h.pow(2).sum()),
    ],
    ids=["normalized", "by a row", "by a count", "a row by many"],
)
def test_gradients_of_quotients_of_nothing_and_more(function):
    compare(function, [(3, 3), (0, 2), (0, 0), (1, 0), (5, 5)])


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, a, b):
        return self.linear(x)[a] * x[b]


PROGRAM = """
import sys

import torch
from test_selected_counts import Product, gradients, masks

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

torch.manual_seed(0)
runtime, model = wrap_model(Product(), config.OrtModuleConfig(cache_dir=sys.argv[1]), stage=0)
for counts in ((3, 3), (1, 3)):
    print([t.tolist() for t in gradients(model, torch.ones(5, 4), *masks(*counts))])
print(runtime.status()["transitions"][0]["cache"].split(":")[0], file=sys.stderr)
"""


def test_a_graph_that_another_process_has_kept(tmp_path):
    found = []
    for cached in ("miss", "hit"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "graphs")]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
        assert ended.returncode == 0 and ended.stderr.splitlines()[-1] == cached, ended.stderr
        found.append(ended.stdout.splitlines()[-2:])
    assert found[0] == found[1]
