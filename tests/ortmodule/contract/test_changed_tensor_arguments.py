"""Submodules in PyTorch that change tensors among their arguments in place: their caller in the graph sees it."""

from __future__ import annotations

import pytest
import torch
from side_by_side import Net, batch, run_side_by_side, train
from torch import nn


class Part(nn.Module):
    """Reads a value, so that it stays in PyTorch."""

    def forward(self, x, *more):
        if x.sum().item() > 1e9:
            raise ValueError("too large")
        return self.change(x, *more)


class Doubles(Part):
    def change(self, x):
        x.mul_(2.0)


class AddsAndTellsTheMean(Part):
    def change(self, x):
        x.add_(1.0)
        return x.mean()


class ClearsAColumn(Part):
    def change(self, x):
        x[:, 0] = 0.0
        return {"rows": x.shape[0]}


class Fills(Part):
    def change(self, x, out):
        out.copy_(x.abs())


class ReturnsIt(Part):
    def change(self, x):
        return x.mul_(2.0)


def model(part: type, forward):
    """Return what makes a model with this submodule, and this forward."""

    def build():
        made = type("Model", (Net,), {"forward": forward})()
        made.part = part()
        return made

    return build


def on_hidden(self, x):
    hidden = self.a(x) * 1.0
    result = self.part(hidden)
    return self.c(hidden) * (result if isinstance(result, torch.Tensor) and result.dim() == 0 else 1.0)


def with_out(self, x):
    hidden = self.a(x)
    out = torch.zeros_like(hidden)
    self.part(hidden, out)
    return self.c(hidden + out)


def with_result(self, x):
    hidden = self.a(x) * 1.0
    doubled = self.part(hidden)
    return self.c(hidden) + self.b(doubled)[:, :3]


def on_argument(self, x):
    self.part(x)
    return self.c(x)


@pytest.mark.parametrize(
    ("part", "forward"),
    [
        (Doubles, on_hidden),
        (AddsAndTellsTheMean, on_hidden),
        (ClearsAColumn, on_hidden),
        (Fills, with_out),
        (ReturnsIt, with_result),
        (Doubles, on_argument),
    ],
    ids=lambda value: value.__name__,
)
def test_the_caller_sees_the_change(part, forward):
    def step(call, module, number):
        x = batch(number)
        result = call(x)
        loss = result.square().mean()
        loss.backward()
        return [loss, result, x]

    status = run_side_by_side(model(part, forward), step)
    assert list(status["in_torch"]) == ["part"]


def test_the_caller_sees_the_change_of_a_view():
    def forward(self, x):
        hidden = self.a(x) * 1.0
        self.part(hidden[:, :3])
        return self.c(hidden)

    run_side_by_side(model(Doubles, forward), train, exclude=["part"])
