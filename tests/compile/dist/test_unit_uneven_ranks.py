"""Ranks that skip experts, and compile them at other times, neither wait for each other nor mix their collectives.

Ranks with other sizes and other graphs are in ``test_lone_unit_decisions.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import launched
from torch import nn
from torch.nn import functional as F

WIDTH = 6
STEPS = 6

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two products beside the input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """Each row goes to one of the experts; an expert without a row does not run."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + result


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Skipped(Experts):
    """One rank leaves an expert out, and hands its gradients on as zeros."""

    def forward(self, x):
        result = super().forward(x)
        return result + 0 * sum(p.sum() for p in self.parameters())


class Skipping(Mixture):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Skipped() for _ in range(2))


def loss_of(engine: Any, step: int) -> torch.Tensor:
    """Return the loss of a batch of this rank."""
    generator = torch.Generator().manual_seed(100 * (step % 2) + torch.distributed.get_rank())
    x = torch.randn(2, WIDTH, generator=generator)
    y = torch.randint(0, 3, (2,), generator=generator)
    return F.cross_entropy(engine(x), y)


def made(kind: type[nn.Module]) -> nn.Module:
    """Return a model, the same on every rank and at every call."""
    torch.manual_seed(0)
    return kind()


BUCKET = 150
"""Elements of a bucket of gradients: a layer fills several, so that order and sizes of reductions matter."""


def experts(run: Run, stage: int) -> None:
    """Have ranks skip experts, which are leaves under ZeRO-3 as DeepSpeed asks for.

    The reference for ZeRO-2 is ZeRO-1, whose order of gradients is that of the parameters. Plain DeepSpeed's ZeRO-2
    adds up gradients of different experts here: its order is that of their arrival.
    """
    model = made(Mixture if stage == 3 else Skipping)
    stage = stage if run.ort or stage == 3 else 1
    if stage == 3:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [Experts])
    run.start(model, stage=stage, reduce_bucket_size=BUCKET)
    called: set[int] = set()
    for number, expert in enumerate(model.layers[0].experts):
        expert.register_forward_hook(lambda *_, number=number: called.add(number))
    for step in range(STEPS):
        called.clear()
        run.step(loss_of(run.engine, step))
        run.seen[f"called {step}"] = sorted(called)
    run.evaluate(loss_of)


STAGES = (2, 3)


def train_all(folder: str) -> dict[str, Any]:
    """Train under each stage."""
    named = {str(stage): functools.partial(experts, stage=stage) for stage in STAGES}
    return compare({name: functools.update_wrapper(each, experts) for name, each in named.items()}, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_skip_experts_train_as_in_plain_deepspeed(stage):
    reports = [report[str(stage)] for report in launched(train_all, 2)]
    for rank, report in enumerate(reports):
        trained_alike(report, f"experts under ZeRO-{stage}, rank {rank}")
        assert max(report["parameters"].values()) <= 1e-4
    assert len({str(report["seen"][1]) for report in reports}) == 2, "ranks call other experts"
