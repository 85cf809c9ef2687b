"""Under ZeRO-2 and 3 a unit behaves as the module it stands for: the same as in plain DeepSpeed, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mutations
import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import launched
from mutations import HOOKS, OF_THE_MODEL, OF_THE_PROCESS, WIDTH
from stack_models import AuxiliaryHeads
from torch import nn


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * torch.distributed.get_rank() + step % 2)
    return torch.randn(4, WIDTH, generator=generator)


def _loss(engine: Any, step: int) -> torch.Tensor:
    return engine(_batch(step)).square().mean()


def changed(mutation: mutations.Mutation, stage: int, run: Run) -> None:
    """Train, change the model, train, change it back, and train."""
    engine = run.start(mutations.stack(), stage=stage)
    run.train(_loss, 3)
    undo = mutation(engine.module)
    try:
        mutations.calls.clear()
        run.train(_loss, range(3, 5))
        run.seen["calls"] = list(mutations.calls)
    finally:
        if undo is not None:
            undo()
    run.train(_loss, range(5, 7))


def heads(stage: int, run: Run) -> None:
    """Use the auxiliary heads in some steps alone; note how often a hook on a head's gradient is called."""
    torch.manual_seed(0)
    engine = run.start(AuxiliaryHeads(WIDTH), stage=stage)
    run.seen["hooks"] = hooks = []
    if stage == 2:  # ZeRO-3 replaces parameters' data, and its own hooks come first
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: hooks.append(name))

    def loss(engine: Any, step: int) -> torch.Tensor:
        main, *others = engine(_batch(step))
        parts = [main.square().mean(), *(each.square().mean() for each in others)]
        return sum(parts) if step % 3 == 0 else parts[0] if step % 3 == 1 else parts[1]

    run.train(loss, 6)
    hooks.sort()


class Nested:
    def __init__(self, features: torch.Tensor, count: int = 0):
        self.inside, self.count = {"all": [SimpleNamespace(features=features)]}, count

    @property
    def features(self) -> torch.Tensor:
        return self.inside["all"][0].features


class Recording(nn.Module):
    """A block that returns an object with its result; `is_same` puts it into the object that came in."""

    def __init__(self, kind: Callable[..., Any], is_same: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.kind, self.is_same = kind, is_same

    def forward(self, record):
        x = record if isinstance(record, torch.Tensor) else record.features
        x = x + self.down(torch.tanh(self.up(x)))
        if self.is_same and not isinstance(record, torch.Tensor):
            record.features = x
            return record
        return self.kind(features=x, count=1)


def records(kind: Callable[..., Any], is_same: bool, stage: int, run: Run) -> None:
    """Train blocks whose results are attributes of objects."""
    torch.manual_seed(0)
    run.start(nn.Sequential(*(Recording(kind, is_same) for _ in range(3))), stage=stage)
    run.train(lambda engine, step: engine(_batch(step)).features.square().mean(), 4)


kept: list[torch.Tensor] = []
"""What units leave for others."""


class Leaving(nn.Module):
    """A block whose result leaves by an argument or a global, and not by its return."""

    def __init__(self, way: str):
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, held):
        x = held["x"] + torch.tanh(self.linear(held["x"]))
        if self.way == "global":
            kept.append(x)
        else:
            held["x"] = x


class Left(nn.Module):
    def __init__(self, way: str):
        super().__init__()
        self.layers, self.way = nn.ModuleList(Leaving(way) for _ in range(3)), way

    def forward(self, x):
        held = {"x": x}
        for layer in self.layers:
            layer(held)
            if self.way == "global":
                held["x"] = kept.pop()
        return held["x"]


def left_elsewhere(way: str, stage: int, run: Run) -> None:
    """Train blocks whose results DeepSpeed cannot see."""
    torch.manual_seed(0)
    run.start(Left(way), stage=stage)
    run.train(_loss, 4)


CHANGES = {
    2: ("layer: backward hook", "all modules: backward hook", "class: forward of a part", "probability of a dropout"),
    3: (
        *("layer: forward hook with kwargs", "layer: backward hook", "layer: backward pre-hook"),
        *("all modules: forward hook that changes", "all modules: backward hook", "class: forward of the unit"),
        *("class: __call__ of all modules", "instance: forward of a part", "instance: forward around the unit's"),
        *("global: function of torch", "a part in eval mode"),
    ),
}
"""By stage; contract/test_changed_models.py has all changes. What is special here are gathers and buckets."""


def scenarios(stage: int) -> dict[str, Callable[[Run], None]]:
    """Return all scenarios of a stage by name."""
    found: dict[str, Callable[[Run], None]] = {}
    for name in CHANGES[stage]:
        change = {**HOOKS, **OF_THE_PROCESS, **OF_THE_MODEL}[name]
        found[name] = lambda run, change=change: changed(change, stage, run)
    found["auxiliary heads"] = lambda run: heads(stage, run)
    for kind in (SimpleNamespace, Nested):
        found[f"records: {kind.__name__}"] = lambda run, kind=kind: records(kind, False, stage, run)
    found["records: the object that came in"] = lambda run: records(SimpleNamespace, True, stage, run)
    for way in ("dict", "global"):
        found[f"left in: {way}"] = lambda run, way=way: left_elsewhere(way, stage, run)
    return found


def compare_stage(stage: int, folder: str) -> dict[str, Any]:
    """Run on each rank: all scenarios of a stage."""
    return compare(scenarios(stage), folder)


@pytest.mark.parametrize("stage, name", [(stage, name) for stage in (2, 3) for name in scenarios(stage)])
def test_a_changed_engine_trains_as_in_plain_deepspeed(stage, name):
    for rank, reports in enumerate(launched(compare_stage, 2, stage)):
        report = reports[name]
        trained_alike(report, f"{name}, ZeRO-{stage}, rank {rank}", failures=True)
        plain, ours = report["seen"]
        assert plain == ours, f"{name}, ZeRO-{stage}, rank {rank}"
        assert max(report["parameters"].values()) <= 1e-4
