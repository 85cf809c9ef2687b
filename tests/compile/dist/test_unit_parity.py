"""Four families of models train unit by unit under ZeRO-1, 2 and 3 as in plain DeepSpeed, on two ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from comparison import Run, compare, trained_alike
from launch_once import launched
from models import losses_of

STEPS = 20
PAIRS = (("gpt2_sdpa", 3), ("bert", 1), ("vit", 2), ("resnet", 3))

# -- what each rank runs -----------------------------------------------------------------------------------------------


def trained(run: Run, name: str, stage: int) -> None:
    """Train twenty steps and evaluate."""
    model, loss_of = losses_of(name, run.rank)
    run.start(model, stage=stage)
    run.train(loss_of, STEPS)
    run.evaluate(loss_of)


def train_all(folder: str) -> dict[str, Any]:
    """Train all pairs of a model and a stage."""
    named = {f"{name}_{stage}": functools.partial(trained, name=name, stage=stage) for name, stage in PAIRS}
    return compare(named, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stage"), PAIRS)
def test_losses_and_gradients_are_those_of_plain_deepspeed(name, stage):
    for rank, reports in enumerate(launched(train_all, 2)):
        report = reports[f"{name}_{stage}"]
        trained_alike(report, f"{name} under ZeRO-{stage}, rank {rank}")
        (status,) = report["models"]
        assert status["zero_stage"] == stage
        units = len(status["units"])
        assert units >= 2
        # an evaluation of a decoder carries a cache of keys and values: its layers run in PyTorch, the head does not
        evaluated = 1 if name.startswith("gpt2") else units
        runs = {"forward": STEPS * units, "backward": STEPS * units, "inference": evaluated}
        assert dict(status["graph_runs"]) == runs
