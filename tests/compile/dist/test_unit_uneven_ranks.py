"""Ranks that compile at other times, or other graphs, neither wait for each other nor mix their collectives."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import once
from rank_processes.ranks import run_on_ranks
from torch import nn
from torch.nn import functional as F

WIDTH = 6
STEPS = 6

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two products, and an activation that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)

    def forward(self, x, variant: int = 0):
        inner = self.up(self.norm(x))
        return x + self.down(torch.tanh(inner) if variant == 0 else F.gelu(inner) if variant == 1 else inner.sin())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x, variant: int = 0):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, variant)
        return self.last(x)


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


def loss_of(engine: Any, step: int, rows: int = 4, *arguments: Any) -> torch.Tensor:
    """Return the loss of a batch of this rank."""
    generator = torch.Generator().manual_seed(100 * (step % 2) + torch.distributed.get_rank())
    x = torch.randn(rows, WIDTH, generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    return F.cross_entropy(engine(x, *arguments), y)


def made(kind: type[nn.Module]) -> nn.Module:
    """Return a model, the same on every rank and at every call."""
    torch.manual_seed(0)
    return kind()


BUCKET = 150
"""Elements of a bucket of gradients: a layer fills several, so that order and sizes of reductions matter."""


def sizes(run: Run, stage: int) -> None:
    """Have rank 0 see one size, the others another one at every step, and a last batch of one row."""
    run.start(made(Layers), stage=stage, reduce_bucket_size=BUCKET)
    for step in range(STEPS):
        rows = 1 if step == STEPS - 1 else 4 if run.rank == 0 else 2 + (step * (run.rank + 1)) % 5
        run.step(loss_of(run.engine, step, rows))
    run.evaluate(loss_of)


def graphs(run: Run, stage: int) -> None:
    """Have each rank take another path from step to step."""
    run.start(made(Layers), stage=stage, reduce_bucket_size=BUCKET)
    for step in range(STEPS):
        run.step(loss_of(run.engine, step, 4, (step // 2 + run.rank) % 3))
    run.evaluate(loss_of)


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
        run.step(loss_of(run.engine, step, 2))
        run.seen[f"called {step}"] = sorted(called)
    run.evaluate(loss_of)


SCENARIOS = {
    2: ((sizes, 2), (sizes, 3), (graphs, 2), (graphs, 3), (experts, 2), (experts, 3)),
    4: ((sizes, 2), (graphs, 3), (experts, 3)),
}
"""What runs by the number of ranks."""


def train_all(folder: str) -> dict[str, Any]:
    """Train each scenario of this number of ranks."""
    pairs = SCENARIOS[int(os.environ["WORLD_SIZE"])]
    named = {f"{kind.__name__} {stage}": functools.partial(kind, stage=stage) for kind, stage in pairs}
    for name, scenario in named.items():
        scenario.__name__ = name
    return compare(named, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


@once
def _launch(ranks: int) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="ort_zero_uneven_") as folder:
        return run_on_ranks(train_all, ranks, folder, timeout=400)


@pytest.mark.parametrize(
    ("ranks", "kind", "stage"),
    [
        pytest.param(ranks, *pair, marks=[pytest.mark.slow] if ranks == 4 else [])
        for ranks, pairs in SCENARIOS.items()
        for pair in pairs
    ],
)
def test_ranks_that_differ_train_as_in_plain_deepspeed(ranks, kind, stage):
    reports = [report[f"{kind.__name__} {stage}"] for report in _launch(ranks)]
    for rank, report in enumerate(reports):
        trained_alike(report, f"{kind.__name__} under ZeRO-{stage}, rank {rank} of {ranks}")
        assert max(report["parameters"].values()) <= 1e-4
    if kind is experts:
        assert len({str(report["seen"][1]) for report in reports}) == ranks, "ranks call other experts"
    else:
        graphs = [report["models"][0]["compiled"]["graphs"] for report in reports]
        assert kind is not sizes or graphs[0] < graphs[1], "only the second rank compiles again for other sizes"
