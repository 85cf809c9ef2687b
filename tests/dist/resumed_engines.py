"""Engines that save, load and go on, and what a program may change between a load and the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from checkpoint_engines import Odd


def made(
    stage: int = 1,
    optimizer: Callable[..., Any] | str = torch.optim.AdamW,
    scheduler: Callable[[Any], Any] | None = None,
    model: torch.nn.Module | None = None,
    accumulate: int = 1,
    sharded: bool = True,
    groups: Callable[[Any], list] | None = None,
    section: bool = True,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return an engine around :class:`Odd` with an optimizer, or one that DeepSpeed makes by name; `more` is config."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = model or Odd()
    trained = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **(more or {}),
    }
    if section:
        config["ort_zero"] = {"backend": "torch", "checkpoint": {"sharded": sharded}}
    if isinstance(optimizer, str):
        config["optimizer"] = {"type": optimizer, "params": {"lr": 0.01, **options}}
        config["zero_optimization"]["reduce_scatter"] = False  # as DeepSpeed's Muon wants it
        return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    made_here = optimizer(trained, **{"lr": 0.01, **options})
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made_here, lr_scheduler=scheduler(made_here) if scheduler else None, config=config
    )
    return engine


def step(engine: Any, seeds: range) -> None:
    """Do a micro-step with each batch."""
    for seed in seeds:
        ids = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(ids))
        engine.step()


def _other_rate(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.05


def _other_decay(engine: Any) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.3


def _other_scheduler(engine: Any) -> None:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)


def _no_gradients(engine: Any) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()


def _other_clipping(engine: Any) -> None:
    engine.optimizer.clip_grad = 1e-3


def _another_backward(engine: Any) -> None:
    step(engine, range(90, 91))  # in the middle of a window of accumulation
    engine.zero_grad()


CHANGES = [_other_rate, _other_decay, _other_scheduler, _no_gradients, _other_clipping, _another_backward]
