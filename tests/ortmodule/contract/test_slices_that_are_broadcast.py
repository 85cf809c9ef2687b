"""Operands whose sizes are computed, as those of slices: the gradient of one that is broadcast is summed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST
from ort_zero.ortmodule.runtime.export_cache import size_guards
from ort_zero.ortmodule.wrap import wrap_model

WIDTH = 6
TABLE = torch.randn(64, WIDTH)


class Net(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def assigned(t):
    u = t.clone()
    u[1] = t[0:1] * 2
    u[:, 1:] = t[:, 0:1]
    u[:, :, 2] = t[:, 1:2, 0]
    return u


SIZES = ((3, 5), (2, 5), (3, 4), (5, 3))
"""Batch sizes and lengths; a batch of one is another graph's where a row of it is broadcast."""
PROGRAMS: dict[str, Callable] = {
    "a position": lambda t: t * t[:, 2:3],
    "a position, narrowed": lambda t: t * t.narrow(1, 2, 1),
    "a row": lambda t: t * t[1:2],
    "the position in the middle": lambda t: t * t[:, t.shape[1] // 2 : t.shape[1] // 2 + 1],
    "a position and all that follow": lambda t: t[:, 1:2] * t[:, 1:],
    "the middle and all that follow": lambda t: t[:, (n := t.shape[1] // 2) : n + 1] * t[:, n:],
    "a row and a position": lambda t: t[1:2] + t[:, 1:2] + t[:, :, 1:2] + t,
    "the larger": lambda t: torch.maximum(t[1:2], t[:, 1:2]),
    "one or the other": lambda t: torch.where(t[1:2] > 0, t, t[:, 2:3]),
    "quotients": lambda t: t / (2 + t[:, 1:2].abs()) / (3 + t[1:2].abs()),
    "a product of matrices": lambda t: t[1:2] @ t.transpose(1, 2),
    "attention to one row": lambda t: F.scaled_dot_product_attention(t[:, None], t[1:2, None], t[1:2, None]),
    "a norm": lambda t: F.layer_norm(t * t[1:2], (WIDTH,)) + t[:, 1:2],
    "expanded": lambda t: t[1:2].expand(t.shape[0], -1, -1) * t + t[:, 2:3].expand_as(t),
    "assigned": assigned,
}


def train(function: Callable, all_sizes: Sequence[tuple[int, int]], in_torch: Sequence[str] = ()):
    """Return the runtime of a module that gave PyTorch's results and gradients for arguments of each of the sizes."""
    torch.manual_seed(0)
    reference = Net(function)
    runtime, ours = wrap_model(copy.deepcopy(reference), config.OrtModuleConfig(log_level="ERROR"), stage=0)
    for sizes in all_sizes:
        x = torch.randn(*sizes, WIDTH)
        found = []
        for model in (ours, reference):
            model.zero_grad()
            result = model(x)
            (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
            found.append((result.detach(), *(parameter.grad for parameter in model.parameters())))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * max(1, other.abs().max()), rtol=1e-5, msg=f"{sizes}")
    assert runtime.status()["backend"] == "onnxruntime" and list(runtime.status()["in_torch"]) == list(in_torch)
    return runtime


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_of_a_slice_that_is_broadcast_is_summed(name):
    assert train(PROGRAMS[name], SIZES).status()["graphs"]["training"]["exports"] == 1


@pytest.mark.parametrize("lengths", [(4, 3, 2, 6), (3, 2, 4), (2, 3)])
def test_two_slices_are_broadcast_at_the_lengths_where_one_of_them_has_a_single_position(lengths):
    train(lambda t: t[:, ::2] * t[:, 1::2], [(2, length) for length in lengths])


@pytest.mark.parametrize(
    ("counted", "shortest"),
    [(lambda t: t[:, -2:], 1), (lambda t: t[:, -3:-1], 2), (lambda t: t[:, -4::2], 1), (lambda t: t[:, -2:5], 1)],
)
def test_places_counted_from_the_end_of_an_axis_that_may_be_too_short_for_them(counted, shortest):
    train(lambda t: t[:, :1] * counted(t), [(2, shortest), (2, 4), (2, 2), (1, 3)])
    runtime = train(lambda t: t[:, :1] * counted(t), [(2, 6), (3, 5), (2, shortest), (2, 2)])
    assert runtime.status()["graphs"]["training"]["exports"] == 2


def test_pieces_of_an_axis_that_is_too_short_for_two():
    train(lambda t: (u := torch.cat(t.split(2, 1), 1))[:, :1] * u, [(2, 1), (1, 2), (2, 5), (3, 2)], ["aten::split"])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten::mish", lambda t: F.mish(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1]),
        ("aten::_convolution", lambda t: F.conv1d(t.transpose(1, 2), torch.ones(WIDTH, 1, 1), groups=WIDTH) * 2),
    ],
)
def test_a_size_of_one_in_the_trace_is_none_that_stays(name, function):
    train(function, [(2, 1), (3, 4), (1, 3)], [name])
    train(function, [(1, 4), (3, 4), (2, 1)], [name])


def test_a_slice_of_one_position_is_another_graphs_where_a_call_is_too_short_for_it():
    runtime = train(lambda t: torch.cat([t[:, 3:4], t], 1), [(2, 5), (2, 4), (2, 3), (2, 2), (2, 6)])
    assert runtime.status()["graphs"]["training"]["exports"] == 2
    (reason,) = runtime.status()["transitions"][1]["reasons"]
    assert reason == "axis 1 of x is 3, less than 4"


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda t: t + TABLE[: t.shape[1]], 0),
        (lambda t: t[:, 1:] * t[:, :-1] + t[:, -1:] * t[:, 2:3], 0),
        (lambda t: t[:, ::2] * t[:, 1::2], 2),
        (lambda t: t[:, : t.shape[1] // 2] * t[:, 2:3], 0),
    ],
)
def test_only_what_may_differ_is_broadcast(function, count):
    graph = train(function, [(2, 4)]).current(True).session.model.graph
    assert sum(BROADCAST in str(node) for node in graph.node) == count


def test_what_the_export_cache_keeps_of_them():
    guard = train(lambda t: t[:, 3:4] * t, [(2, 5)]).current(True).known.export.size_guard
    assert [(str(axis), least) for axis, least in guard.relations.least] == [("axis 1 of x", 4)]
    assert size_guards.read(size_guards.written(guard)).relations == guard.relations
