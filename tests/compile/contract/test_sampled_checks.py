"""A kernel that is right in its first run and wrong for later values is found at a sample, and PyTorch takes over.

The operator ``sinh`` gets an ONNX form here that is wrong for some values or sizes. The samples may take any time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ort_zero
from ort_zero.compile import dynamo_backend, trial
from ort_zero.compile.conversion import registry
from ort_zero.compile.conversion.fragments import Builder, Value
from ort_zero.runtimes.agreement import agreement

WIDTH = 8


def right(b: Builder, x: Value) -> Value:
    """Return the ONNX form of ``sinh``."""
    difference = b.op("Sub", b.op("Exp", x), b.op("Exp", b.op("Neg", x)))
    return b.op("Mul", difference, b.constant(0.5, x.dtype))


def wrong_for_a_large_mean(b: Builder, x: Value) -> Value:
    return b.op("Where", b.op("Greater", b.op("ReduceMean", x, keepdims=0), b.constant(3.0, x.dtype)), x, right(b, x))


def wrong_for_negative_numbers(b: Builder, x: Value) -> Value:
    return right(b, b.op("Abs", x))


def wrong_for_more_rows(b: Builder, x: Value) -> Value:
    rows = b.op("Gather", b.op("Shape", x), b.constant(0, torch.int64), axis=0)
    return b.op("Where", b.op("Less", rows, b.constant(20, torch.int64)), right(b, x), x)


def inputs(change: Callable[[torch.Tensor], torch.Tensor], sizes: int = 1) -> list[torch.Tensor]:
    """Return the inputs of 20 calls: positive numbers below 1, and changed ones from the sixth call on."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.rand(4 + call % sizes, WIDTH, generator=generator) for call in range(20)]
    return [change(x) if call >= 5 else x for call, x in enumerate(plain)]


WRONG = {
    wrong_for_a_large_mean: lambda x: x + 4,
    wrong_for_negative_numbers: torch.neg,
    wrong_for_more_rows: lambda x: x.repeat(5, 1),
}


class Unit(nn.Module):
    """Draws, changes a buffer and a tensor in place, and calls ``sinh``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = self.linear(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = (x * 2).sinh().add_(self.mean * 0.1)
        return self.drop(x) + torch.rand(WIDTH) * float(np.random.rand())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(dynamo_backend, "_trials", {})
    agreement.cache_clear()
    monkeypatch.setattr(trial, "_SAMPLED_SHARE", 1.0)
    yield
    agreement.cache_clear()


def trained(model: nn.Module, calls: list[torch.Tensor]) -> list[Any]:
    """Return the results of training calls, the buffers, and the next random numbers."""
    torch.manual_seed(0), np.random.seed(0)
    results: list[Any] = []
    for x in calls:
        result = model(x)
        result.nan_to_num(0, 0, 0).clamp(-5, 5).sum().backward()
        results.append(result.detach())
    return [results, list(model.buffers()), [torch.rand(1), np.random.rand()]]


@pytest.mark.parametrize("way", ["wrap", "torch.compile"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_form_that_is_wrong_for_later_values_is_found_at_the_sample(wrong, way, monkeypatch, tmp_path):
    monkeypatch.setitem(registry.table(), torch.ops.aten.sinh.default, lambda b, out, x: wrong(b, x))
    torch.manual_seed(0)
    is_of_sizes = wrong is wrong_for_more_rows
    plain, calls = nn.Sequential(Unit(), nn.Identity()), inputs(WRONG[wrong], 2 if is_of_sizes else 1)
    options = {"place": "ort", "reproducers": str(tmp_path)}
    if way == "wrap":
        model = ort_zero.wrap(copy.deepcopy(plain), compile=options, log_level="ERROR")
    else:
        model = torch.compile(copy.deepcopy(plain), backend="ort_zero", options=options)
    (ours, buffers, numbers), (theirs, wanted, same) = trained(model, calls), trained(plain, calls)
    assert numbers == same
    torch.testing.assert_close(buffers, wanted, equal_nan=True)
    first = 6 if is_of_sizes else 8  # the first run with new sizes, or the next sample
    torch.testing.assert_close(ours[:5] + ours[first - 1 :], theirs[:5] + theirs[first - 1 :], equal_nan=True)
    (reproducer,) = {path.parent.name for path in tmp_path.glob("*/reproduce.py")}
    if way == "wrap":
        compiled = ort_zero.status()["models"][-1]["compiled"]
        assert list(compiled["failed"]) == [reproducer]
        assert 0 < compiled["checked_runs"] < compiled["runs"] and compiled["check_seconds"] > 0


def test_a_right_form_stays_and_a_check_changes_nothing(monkeypatch):
    """Random numbers, buffers and what is changed in place are those of PyTorch, checked in each run or in none."""
    monkeypatch.setitem(registry.table(), torch.ops.aten.sinh.default, lambda b, out, x: right(b, x))
    torch.manual_seed(0)
    plain, calls, seen = nn.Sequential(Unit(), nn.Identity()), inputs(lambda x: x, 2), {}
    for verify in ("off", "sampled", "always"):
        options = {"place": "ort", "verify": verify}
        model = ort_zero.wrap(copy.deepcopy(plain), compile=options, log_level="ERROR")
        results, buffers, numbers = trained(model, calls)
        compiled = ort_zero.status()["models"][-1]["compiled"]
        assert compiled["failed"] == {} and compiled["segments_in_torch"] == 0
        seen[verify] = compiled["checked_runs"], results, buffers, numbers
    (none, *off), (some, *sampled), (every, *always) = seen.values()
    assert none == 0 < some < every
    for others in (sampled, always):
        torch.testing.assert_close(off[:2], others[:2], rtol=0, atol=0)
        assert off[2] == others[2]
