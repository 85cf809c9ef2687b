"""DeepSpeed's instruments show of a compiled model what they show of plain DeepSpeed."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from deepspeed_setup import ds_config, start
from launch_once import launched

import ort_zero

STEPS = 5


def engine_of(stage: int, compiled: bool, config: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """Return an engine around a GPT-2, and a function that trains a step and returns its loss."""
    import deepspeed

    torch.manual_seed(0)
    model = tiny_models.gpt2(words=64, hidden=16, heads=2)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {**ds_config(stage, ort=None, **zero), **config}
    if compiled:
        config["ort_zero"] = {"backend": "compile", "compile": {"place": "ort"}, "log_level": "WARNING"}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(engine.global_rank))

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids)["loss"]
        engine.backward(loss)
        engine.step()
        return loss.item()

    return engine, step


def instrumented(folder: str, stage: int, compiled: bool) -> dict[str, Any]:
    """Train a GPT-2 with all instruments; return what each of them shows on this rank."""
    rank = start()
    from deepspeed.comm import comm
    from deepspeed.runtime.utils import see_memory_usage

    where = Path(folder) / f"{stage} {compiled}"
    flops = where / f"flops_{rank}.txt"
    config = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True, "prof_all": True},
        "csv_monitor": {"enabled": True, "output_path": str(where), "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False, "output_file": str(flops)},
    }
    comm.comms_logger.comms_dict.clear()
    engine, step = engine_of(stage, compiled, config)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = [step() for _ in range(STEPS)]
        see_memory_usage("at the end", force=True)
    lines = printed.getvalue().splitlines()
    shown = {
        "losses": losses,
        "flops": re.findall(r"fwd flops per GPU: +(\S+ \S+)", flops.read_text()) if flops.exists() else [],
        "timers": sorted({name for line in lines if "time (ms)" in line for name in re.findall(r"\| (\w+):", line)}),
        "memory": sum(line.endswith("at the end") or "Max_MA" in line for line in lines),
        "collectives": {
            name: Counter({size: entry[0] for size, entry in sizes.items()})
            for name, sizes in comm.comms_logger.comms_dict.items()
        },
        "files": {
            file.name: [row[1] for row in csv.reader(file.open()) if file.stem.endswith("_lr")]
            for file in sorted((where / "run").glob("*.csv"))
        },
    }
    if compiled:
        status = ort_zero.status()["models"][-1]
        runs = 3 * (STEPS - 1)
        assert status["fallbacks"] == 0 and status["graph_runs"] == {"forward": runs, "backward": runs}
    engine.destroy()
    return shown


STAGES = (1, 3)


def instrumented_twice(folder: str) -> list[list[dict[str, Any]]]:
    """Train under each stage in plain DeepSpeed, then compiled."""
    return [[instrumented(folder, stage, compiled) for compiled in (False, True)] for stage in STAGES]


@pytest.mark.parametrize("stage", STAGES)
def test_instruments_show_what_they_show_of_plain_deepspeed(stage):
    plain, ours = zip(*(reports[STAGES.index(stage)] for reports in launched(instrumented_twice, 2)))
    for theirs, mine in zip(plain, ours, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    for name in ("flops", "timers", "memory", "files"):  # of the rank that writes them
        assert ours[0][name] == plain[0][name], name
    assert ours[0]["flops"] and "fwd" in ours[0]["timers"] and ours[0]["memory"]
    assert any(name.endswith("_lr.csv") for name in ours[0]["files"]) and any(
        "forward" in name for name in ours[0]["files"]
    )
    mine, theirs = ours[0]["collectives"], plain[0]["collectives"]
    assert mine.keys() == theirs.keys()
    if stage == 1:
        assert mine == theirs
    else:  # a unit is gathered at once, so there are fewer gathers; their bytes are the same
        gathered = [
            sum(size * count for size, count in each["all_gather_into_tensor"].items()) for each in (mine, theirs)
        ]
        assert gathered[0] == gathered[1] > 0
        assert mine["all_gather_into_tensor"].total() < theirs["all_gather_into_tensor"].total()
        assert mine["reduce_scatter_tensor"] == theirs["reduce_scatter_tensor"]
