"""What the ranks of the convergence tests run: short trainings whose statistics are collected."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

import torch
import torch.distributed as dist
from convergence_models import FAULTS, PARTS, batch, build
from workers import ds_config, start

import ort_zero


def collect(
    folder: str,
    name: str,
    *,
    ort: bool,
    stage: int,
    steps: int,
    fault: str | None = None,
    seed_rank: int = 1,
    statistics: dict | None = None,
    **zero: Any,
) -> list[float]:
    """Train under the section of the config alone, statistics into `folder`; return the losses."""
    import deepspeed

    config = ds_config(stage, ort=ort, **zero)
    config["ort_zero"]["ortmodule"]["log_level"] = "ERROR"
    config["ort_zero"]["statistics"] = {"enabled": True, "output_dir": folder, **(statistics or {})}
    model = build(name)
    if fault is not None:
        FAULTS[fault][0](model, PARTS[name])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(steps):
        arguments = batch(name, dist.get_rank(), step)
        if fault == "one rank's data shuffled" and dist.get_rank() == seed_rank:
            arguments = {key: value.roll(1, 0) for key, value in arguments.items()}
        loss = engine(**arguments)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if ort:
        status = ort_zero.status()["models"]
        mine = next(m for m in status if m["graphs"].get("training", {}).get("runs", {}).get("forward") == steps)
        assert mine["fallbacks"] == 0 and mine["graphs"]["training"]["runs"]["backward"] == steps, status
    engine.destroy()
    del engine, model
    import gc

    gc.collect()
    return losses


def ddp(folder: str, name: str, steps: int) -> None:
    """Train in DistributedDataParallel without DeepSpeed, as ZeRO-0 does."""
    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(build(name), broadcast_buffers=False)
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder, end_step=steps)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        model(**batch(name, dist.get_rank(), step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    session.remove()
    session.remove()


def killed(folder: str, name: str, steps: int) -> None:
    """Train; then all ranks are gone from one moment to the next."""
    start()
    import deepspeed

    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    model = build(name)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(1, ort=None))
    GlobalSubscriberManager.subscribe(engine, [StatisticsSubscriber(folder)])
    for step in range(steps):
        loss = engine(**batch(name, dist.get_rank(), step))["loss"]
        engine.backward(loss)
        engine.step()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def runs(folder: str, plan: list[dict[str, Any]]) -> list[list[float]]:
    """Collect one run after the other, each in a folder of its own."""
    start()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for options in plan:
        options = dict(options)
        found.append(collect(str(Path(folder, options.pop("to"))), options.pop("model"), **options))
    return found
