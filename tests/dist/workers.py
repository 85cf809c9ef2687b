"""What the ranks of the distributed tests run; each function is started by ``run_on_ranks``."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

import torch

import ort_zero


def ds_config(stage: int, *, ort: bool | None, gas: int = 1, lr: float = 1e-3, **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed config; `ort` None leaves the section out."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    if ort is not None:
        config["ort_zero"] = {"ortmodule": {"enabled": ort}}
    return config


def start() -> int:
    """Start the process group and the plugin; return the rank."""
    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return torch.distributed.get_rank()


def full_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every full parameter. All ranks must call."""
    import deepspeed

    params = dict(model.named_parameters())
    partitioned = hasattr(next(iter(params.values())), "ds_id")
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=partitioned):
        return {name: p.detach().clone() for name, p in params.items()}


def train(name: str, config: dict, steps: int, inspect: bool = False) -> dict[str, Any]:
    """Train the model `name` and return losses, final parameters, the status of ort_zero and what `inspect` saw."""
    import deepspeed
    from models import Batches, build

    model = build(name)
    calls = [0]
    plain = type(model).forward

    def counted(self, *args, **kwargs):
        calls[0] += 1
        return plain(self, *args, **kwargs)

    counted.__wrapped__ = plain
    type(model).forward = counted
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
        )
        batches = Batches(name, torch.distributed.get_rank())
        gas = engine.gradient_accumulation_steps()
        losses, left = [], []
        for step in range(steps):
            total = 0.0
            for micro in range(gas):
                loss = batches.loss(engine, step * gas + micro)
                if inspect:
                    left.append(_whole(model))
                engine.backward(loss)
                engine.step()
                total += loss.item()
            if inspect:
                left.append(_whole(model))
            losses.append(total / gas)
        engine.eval()
        with torch.no_grad():
            evaluated = batches.loss(engine, 0).item()
        engine.train()
        result = {
            "losses": losses,
            "evaluated": evaluated,
            "parameters": full_parameters(model),
            "status": ort_zero.status(),
            "forward_calls": calls[0],
            "left_whole": left,
        }
        engine.destroy()
        del engine, model
        gc.collect()
        return result
    finally:
        type(build(name)).forward = plain


def compare(name: str, stages: list[int], steps: int, options: dict | None = None) -> dict[str, Any]:
    """Train once in PyTorch and once in ORT for each stage; return what the test asserts on."""
    start()
    options = options or {}
    report = {}
    for stage in stages:
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        reference = train(name, ds_config(stage, ort=None, **options, **zero), steps)
        ours = train(name, ds_config(stage, ort=True, **options, **zero), steps, inspect=stage == 3)
        pairs = [(reference["parameters"][n], p) for n, p in ours["parameters"].items()]
        report[stage] = {
            "reference": reference["losses"],
            "losses": ours["losses"],
            "evaluated": (reference["evaluated"], ours["evaluated"]),
            "parameter_difference": max((a - b).abs().max().item() for a, b in pairs),
            "moved": max(
                (a - b).abs().max().item()
                for a, b in zip(ours["parameters"].values(), _initial(name).values(), strict=True)
            ),
            "status": ours["status"]["models"][-1],
            "fallbacks": ours["status"]["fallbacks"],
            "forward_calls": (reference["forward_calls"], ours["forward_calls"]),
            "left_whole": ours["left_whole"],
            "parameters": sum(p.numel() for p in ours["parameters"].values()),
        }
    return report


def _initial(name: str) -> dict[str, torch.Tensor]:
    from models import build

    return {n: p.detach() for n, p in build(name).named_parameters()}


def _whole(model: torch.nn.Module) -> int:
    """Return how many parameters are not partitioned at the moment."""
    return sum(p.ds_status.name != "NOT_AVAILABLE" or p.numel() > 0 for p in model.parameters())
