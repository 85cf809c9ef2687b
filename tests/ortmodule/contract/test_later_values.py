"""Programs whose first run shows nothing wrong: what later values need is refused, or rewritten before the export."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_zero


class Program(nn.Module):
    """Calls a function with a layer that changes nothing, a gate, and tensors.

    Args:
        function: the program.
    """

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function
        self.layer, self.gate = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(()))
        nn.init.eye_(self.layer.weight)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return what the function returns."""
        return self.function(self.layer, self.gate, *tensors)


def detached(layer, gate, x):
    return x + gate * layer(x.detach())


def without_gradient(layer, gate, x):
    with torch.no_grad():
        h = layer(x)
    return x + gate * h


def changed_without_gradient(layer, gate, x):
    h = layer(x)
    with torch.no_grad():
        h.mul_(1 + gate)
    return h


def part_filled(layer, gate, x):
    h = layer(x)
    part = h[:, :2]
    part.masked_fill_(x[:, :2] > 4, 0.0)
    return h * 2


def clamped_below_a_view(layer, gate, x):
    h = layer(x)
    view = h.view(2, 2, -1)
    h.clamp_(-4, 4)
    return view * 2


def part_dropped(layer, gate, x):
    h = layer(x)
    F.dropout(h[:, :2], 0.5, True, inplace=True)
    return h


def last_of_rows(layer, gate, x, last):
    return layer(x)[torch.arange(4), last]


def loss_of_labels(layer, gate, x, labels):
    return F.cross_entropy(layer(x), labels)


def negative_log_likelihood(layer, gate, x, labels):
    return F.nll_loss(layer(x), labels)


ORDERS = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
LABELS = torch.tensor([[0, 1, 2, 3], [-100, -100, -100, -100], [4, 1, 0, 0], [-1, 1, 0, 0], [10**8, 1, 0, 0]])
X = torch.linspace(-2.0, 3.0, 16).reshape(4, 4)
LIMITS = torch.tensor(
    [[0.0, 6.0, 1.0, -1.0], [6.0, 0.0, 7.0, -7.0], [math.nan, 0.0, 2.0, 2.0], [math.inf, -math.inf, 0.0, 3.0]]
)
EMPTY = torch.full((4, 4), -math.inf).index_fill(0, torch.tensor([2]), 1.0)
NAN = X.clone().fill_diagonal_(math.nan)
NORMS = X * torch.tensor([0.0, 1.0, 1.0, 0.0])[:, None]
IN_PYTORCH = [
    (detached, [(X,), (X,)], "ends a gradient"),
    (without_gradient, [(X,), (X,)], "ends a gradient"),
    (changed_without_gradient, [(X,), (X,)], "ends a gradient"),
    (part_filled, [(X,), (X * 3,)], "a view is read later"),
    (clamped_below_a_view, [(X,), (X * 3,)], "a view is read later"),
    (part_dropped, [(X,), (X,)], "others read"),
    (last_of_rows, [(X, ORDERS[0]), (X, ORDERS[0] - 2), (X, ORDERS[0] + 1)], "index"),
    (loss_of_labels, [(X, labels) for labels in LABELS], "index"),
    (negative_log_likelihood, [(X, labels) for labels in LABELS], "index"),
    *(
        (function, [(X, ORDERS), (X, ORDERS - 1), (X, ORDERS + 1)], "index")
        for function in (
            lambda layer, gate, x, index: layer(x).gather(0, index),
            lambda layer, gate, x, index: layer(x).index_select(0, index[0]),
            lambda layer, gate, x, index: layer(x).scatter(0, index, 1.0),
            lambda layer, gate, x, index: layer(x) * F.one_hot(index[0], 4),
        )
    ),
    (lambda layer, gate, x: layer(x).norm(p=3, dim=-1), [(X,), (NORMS,)], "norm of 0"),
    (lambda layer, gate, x: F.max_pool1d((x * layer.weight[0, 0])[None], 2), [(X,), (EMPTY,), (NAN,)], "-inf"),
    (
        lambda layer, gate, x: F.max_pool2d((x * layer.weight[0, 0])[None, None], 2, return_indices=True)[0],
        [(X,), (EMPTY,), (NAN,)],
        "-inf",
    ),
    (lambda layer, gate, x: torch.erf(layer(x)), [(X,), (NAN,)], "NaN"),
    (lambda layer, gate, x: F.kl_div(layer(x), torch.ones(4, 4)), [(X,), (NAN,)], "NaN"),
    (lambda layer, gate, x: layer(x).topk(2)[0], [(X,), (NAN,)], "NaN"),
    (lambda layer, gate, x: layer(x).sort()[0], [(X,), (NAN,)], "NaN"),
    (lambda layer, gate, x: layer(x) ** 0, [(X,), (NORMS,)], "power of 0"),
    (lambda layer, gate, x: F.cosine_similarity(layer(x), x + 1), [(X,), (NORMS,)], "row of 0"),
]  # fmt: skip
IN_ORT = [
    (lambda layer, gate, x: F.relu6(x * layer.weight[0, 0]), [(X,), (LIMITS,)]),
    (lambda layer, gate, x: F.hardtanh(x * layer.weight[0, 0]), [(X,), (LIMITS,)]),
    (lambda layer, gate, x: F.pairwise_distance(layer(x), layer(x.flip(0))), [(X,), (X[:1].expand(4, 4),)]),
    (lambda layer, gate, x: layer(x).norm(dim=-1, keepdim=True), [(X,), (NORMS,)]),
    (lambda layer, gate, x: F.gelu(layer(x)), [(X,), (NAN,)]),
    (lambda layer, gate, x: F.max_pool2d((x * layer.weight[0, 0])[None, None], 2), [(X,), (EMPTY,), (NAN,)]),
]
CASES = [(*case, None) for case in IN_ORT] + IN_PYTORCH


def outcome(model: nn.Module, step: int, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return results and gradients of a step, or the kind of the error that it raises."""
    torch.manual_seed(step)
    model.gate.data.fill_(float(step))
    x = tensors[0].clone().requires_grad_()
    try:
        result = model(x, *tensors[1:])
    except (IndexError, RuntimeError) as error:
        return type(error)
    weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
    gradients = torch.autograd.grad(result, [x, *model.parameters()], weights, allow_unused=True)
    return [result.detach(), *gradients]


@pytest.mark.parametrize(("function", "calls", "words"), CASES)
def test_later_values_give_what_pytorch_gives(function, calls, words):
    torch._dynamo.reset()
    eager = Program(function)
    wrapped = ort_zero.wrap(copy.deepcopy(eager), backend="ortmodule", ortmodule={"place": "ort"}, fallback="warn")
    for step, tensors in enumerate(calls):
        wanted, found = outcome(eager, step, tensors), outcome(wrapped, step, tensors)
        if isinstance(wanted, type):
            assert found is wanted
        else:
            torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-4, atol=1e-6)
    status = ort_zero.status()["models"][-1]
    reasons = " ".join(status["in_torch"].values())
    assert words in reasons if words else not reasons
    assert (status["compiled"]["session_runs"]["forward"] == 0) == bool(words)


class Whole(nn.Module):
    """A tensor and its first row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        """Return both."""
        h = self.layer(x)
        return h, h[0]


class Strided(nn.Module):
    """A result that lies in memory as its transpose."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 1), nn.LayerNorm(4)

    def forward(self, x):
        """Return [rows, 4, length]."""
        return self.norm(self.convolution(x).transpose(1, 2)).transpose(1, 2)


class Mean(nn.Module):
    """A layer whose backward reads the sizes of an input alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        """Return [rows, 4]."""
        return self.layer(x.mean(1))


def both(make: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a module for PyTorch, and an equal one whose graphs run in ONNX Runtime where they can."""
    torch._dynamo.reset()
    eager = make()
    return eager, ort_zero.wrap(copy.deepcopy(eager), backend="ortmodule", ortmodule={"place": "ort"}, fallback="warn")


def test_results_that_share_memory_do_so():
    eager, wrapped = both(Whole)
    for model in (eager, wrapped):
        whole, first = model(X)
        whole.mul_(10)
        torch.testing.assert_close(first, whole[0])
    assert "share memory" in " ".join(ort_zero.status()["models"][-1]["in_torch"].values())


@pytest.mark.parametrize("trains", [True, False])
def test_a_result_lies_in_memory_as_in_pytorch_so_that_later_dropouts_draw_the_same(trains):
    x, found = torch.randn(2, 4, 6), []
    for model in both(Strided):
        torch.manual_seed(0)
        with torch.set_grad_enabled(trains):
            result = model(x)
            found.append((result.stride(), F.dropout(result, 0.5)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])
    assert ort_zero.status()["models"][-1]["compiled"]["session_runs"]["forward" if trains else "inference"]


def test_an_input_whose_sizes_alone_the_backward_reads_may_change():
    for model in both(Mean):
        leaf = torch.ones(2, 3, 4, requires_grad=True)
        x = leaf * 1
        y = model(x)
        x.mul_(2)
        (y.sum() + x.sum()).backward()
        wanted = 2 + model.layer.weight.sum(0) / 3
        torch.testing.assert_close(leaf.grad, wanted.expand(2, 3, 4))
    assert ort_zero.status()["models"][-1]["compiled"]["session_runs"]["backward"]


class LastTokens(Mean):
    """A mean of at most the last 50 tokens: the graph of short texts does not fit long ones."""

    def forward(self, x):
        """Return [rows, 4]."""
        return self.layer(x[:, -50:].sum(1))


def test_a_longer_text_than_a_graph_allows_for_does_not_write_out_of_bounds():
    models = both(LastTokens)
    for length in (*range(5, 12), *range(51, 70)):
        x = torch.randn(2, length, 4)
        found = []
        for model in models:
            leaf = x.clone().requires_grad_()
            model(leaf).square().sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_an_encoder_evaluates_with_a_padding_mask():
    eager, wrapped = both(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).eval()
    )
    padding = torch.arange(6) > torch.tensor([[5], [3]])
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x, src_key_padding_mask=padding), eager(x, src_key_padding_mask=padding))
