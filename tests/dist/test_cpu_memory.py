"""`"cpu_memory"` changes no number, whoever runs the model, and switched off it leaves DeepSpeed's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from launch_once import once
from rank_processes.ranks import run_on_ranks
from torch import nn

STAGES = (1, 2, 3)
OFF = {"cpu_memory": False}
SECTIONS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "off": {"backend": "torch", **OFF},
    "on": {"backend": "torch"},
}
UNDER_ZERO = ["collectives in place", "Adam in pieces", "buckets of at most 32 MiB", "freed memory is kept"]


def theirs() -> list[Any]:
    """Return the functions of DeepSpeed and torch that the measures replace."""
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return [
        TorchBackend.all_gather_into_tensor,
        TorchBackend.reduce_scatter_tensor,
        DeepSpeedZeroOptimizer.allreduce_and_scatter,
        torch.optim.Adam._init_group,
    ]


def engine_of(stage: int, section: dict[str, Any] | None) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33)) for _ in range(3)))
    config = ds_config(stage, ort=None)
    if section is not None:
        config["ort_zero"] = {"log_level": "ERROR", **section}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def trained(stage: int, section: dict[str, Any] | None, originals: list[Any]) -> dict[str, Any]:
    """Train three steps; return losses, weights and what the measures have done."""
    import ort_zero

    engine = engine_of(stage, section)
    generator = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(4, 33, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    status = ort_zero.status()
    report = {
        "numbers": [losses, [each.tolist() for each in full_parameters(engine.module).values()]],
        "theirs": [now is before for now, before in zip(theirs(), originals, strict=True)],
        "bucket": engine.optimizer.reduce_bucket_size,
        "in_effect": status["cpu_memory"],
    }
    engine.destroy()
    return report


def train_all() -> dict[Any, dict[str, Any]]:
    start()
    originals = theirs()
    return {(stage, name): trained(stage, section, originals) for stage in STAGES for name, section in SECTIONS.items()}


@once
def _launch() -> list[dict[Any, dict[str, Any]]]:
    return run_on_ranks(train_all, 2, timeout=300)


@pytest.mark.parametrize("stage", STAGES)
def test_off_leaves_the_very_objects_of_deepspeed_and_torch_and_the_numbers_are_equal(stage: int):
    for rank in _launch():
        of_stage = {name: rank[stage, name] for name in SECTIONS}
        assert len(set(of_stage["plain"]["numbers"][0])) == 3
        assert of_stage["off"]["numbers"] == of_stage["on"]["numbers"] == of_stage["plain"]["numbers"]
        for name in ("plain", "off"):
            assert of_stage[name]["theirs"] == [True] * 4, name
            assert not {*UNDER_ZERO[:3]} & {*of_stage[name]["in_effect"]}, name
            assert of_stage[name]["bucket"] == of_stage["plain"]["bucket"]
        assert of_stage["on"]["theirs"] == [False] * 4 and of_stage["on"]["in_effect"] == UNDER_ZERO
        assert of_stage["on"]["bucket"] < (32 << 20) // 4 < of_stage["plain"]["bucket"]
    assert all(rank[1, "off"]["in_effect"] == [] for rank in _launch())


def unequal() -> str:
    """Make an engine whose section differs on rank 1; return the error."""
    from ort_zero.errors import RankError

    rank = start()
    try:
        engine_of(2, {"backend": "torch", "cpu_memory": not rank})
    except RankError as error:
        return str(error)
    return "no error"


def test_sections_that_differ_are_one_error_on_both_ranks():
    first, second = run_on_ranks(unequal, 2)
    assert first == second and '"cpu_memory" in the section differs: rank 0 has True; rank 1 has False' in first
