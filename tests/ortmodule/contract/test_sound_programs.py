"""Programs that a trace gets wrong: Dynamo's guards and the refusals of graphs keep them right."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import ort_zero


class Base(nn.Module):
    """Two linear layers."""

    sizes = (4,)
    """Rows of the batches, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def before(self, step: int) -> None:
        """Change what the forward reads, before a step."""

    def forward(self, x):
        """Return two layers of `x`."""
        return self.b(self.a(x))


class Attribute(Base):
    scale = 1.0

    def before(self, step):
        self.scale = 1.0 + step

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) * self.scale


FACTOR = [1.0]


class Global(Base):
    def before(self, step):
        FACTOR[0] = 1.0 + step

    def forward(self, x):
        return self.b(self.a(x)) * FACTOR[0]


class Branch(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y) if y.sum() > 0 else y * 2


class Item(Base):
    def forward(self, x):
        return self.b(self.a(x)) * x.abs().max().item()


class RandomLayer(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y) if random.random() < 0.5 else y


class RunningStatistics(Base):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.n(self.a(x))


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return self.b(self.a(x)) * self.n


class Sizes(Base):
    sizes = (4, 6, 10, 7)

    def forward(self, x):
        half = x.shape[0] // 2
        return torch.cat([self.a(x[:half]), self.b(x[half:])]) / x.shape[0]


class Freeze(Base):
    def before(self, step):
        self.a.weight.requires_grad_(step % 2 == 0)


class Replace(Base):
    def before(self, step):
        if step == 2:
            self.b = nn.Identity()


class InPlace(Base):
    def forward(self, x):
        y = self.a(x)
        y[:, 0] = 0
        y.mul_(2)
        return self.b(y)


class Hook(Base):
    def before(self, step):
        if step == 2:
            self.a.register_forward_hook(lambda module, inputs, output: output * 3)


class Dict(Base):
    def forward(self, x):
        y = self.a(x)
        return {"logits": self.b(y), "hidden": y, "name": "x", "none": None}


class View(Base):
    def forward(self, x):
        return self.a(x), x.view(-1), torch.arange(3)


IN_PYTORCH = {RunningStatistics: "running statistics", Counter: "changes its argument"}
PROGRAMS = [Attribute, Global, Branch, Item, RandomLayer, RunningStatistics, Counter, Sizes, Freeze, Replace, InPlace,
            Hook, Dict, View]  # fmt: skip


def step_of(model: Any, step: int) -> list[torch.Tensor | None]:
    """Return results, gradients and buffers of a step."""
    random.seed(step)
    model.before(step)
    rows = model.sizes[step % len(model.sizes)]
    y = model(torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)))
    results = [value for value in (y.values() if isinstance(y, dict) else y if isinstance(y, tuple) else (y,))
               if isinstance(value, torch.Tensor)]  # fmt: skip
    model.zero_grad(set_to_none=True)
    sum(value.square().sum() for value in results if value.requires_grad).backward()
    return [*results, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_step_is_that_of_pytorch(program):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = program()
    wrapped = ort_zero.wrap(copy.deepcopy(eager), backend="ortmodule", ortmodule={"place": "ort"}, fallback="warn")
    for step in range(5):
        for theirs, ours in zip(step_of(eager, step), step_of(wrapped, step), strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    status = ort_zero.status()["models"][-1]
    reasons = " ".join(status["in_torch"].values())
    assert (IN_PYTORCH[program] in reasons) if program in IN_PYTORCH else not reasons
    assert (status["compiled"]["session_runs"]["forward"] >= 5) == (program not in IN_PYTORCH)
