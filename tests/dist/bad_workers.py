"""Ranks that are given bad input; each returns what was raised, and what still works afterwards."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from workers import ds_config, start

import ort_zero


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.spare = nn.Linear(6, 3)

    def forward(self, x, extra=None):
        out = self.b(torch.tanh(self.a(x)))
        return out if extra is None else out + self.spare(extra)


class FailsOnRank1(Plain):
    def forward(self, x):
        if torch.jit.is_tracing() and torch.distributed.get_rank() == 1:
            raise ValueError("this rank cannot trace")
        return super().forward(x)


class Fourier(Plain):
    def forward(self, x):
        return super().forward(torch.fft.rfft(x, n=10).abs())


class Checkpointed(Plain):
    def forward(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False))


class Opaque:
    def __init__(self, value):
        self.value = value


class ReturnsOpaque(Plain):
    def forward(self, x):
        return Opaque(super().forward(x))


MODELS = {c.__name__: c for c in (Plain, FailsOnRank1, Fourier, Checkpointed, ReturnsOpaque)}


def _caught(action) -> dict[str, Any]:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"type": None, "text": "", "seconds": time.monotonic() - began}


def _engine(model: nn.Module, config: dict):
    import deepspeed

    torch.manual_seed(0)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def first_step(name: str, stage: int) -> dict[str, Any]:
    """Train one step of a model that cannot be exported."""
    start()
    engine = _engine(MODELS[name](), ds_config(stage, ort=True, stage3_param_persistence_threshold=0))
    return _caught(lambda: engine.backward(engine(torch.randn(4, 6)).sum()))


def other_structure_on_rank_1(stage: int) -> list[dict[str, Any]]:
    """Give rank 1 an argument that the others lack, then give all the same: the second call has to work."""
    rank = start()
    engine = _engine(Plain(), ds_config(stage, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)

    def step(extra):
        engine.backward(engine(x, extra).sum())
        engine.step()

    results = [_caught(lambda: step(None)), _caught(lambda: step(x if rank == 1 else None))]
    results.append(_caught(lambda: step(None)))
    return results


def half_precision(stage: int) -> list[dict[str, Any]]:
    """Ask for bf16 on the CPU, in the config and in the model."""
    start()
    in_config = ds_config(stage, ort=True) | {"bf16": {"enabled": True}}
    results = [_caught(lambda: _engine(Plain(), in_config))]
    engine = _engine(Plain().to(torch.bfloat16), ds_config(stage, ort=True))
    results.append(_caught(lambda: engine(torch.randn(4, 6, dtype=torch.bfloat16))))
    return results


def no_compiler() -> dict[str, Any]:
    """Make an engine where the extensions have to be built and cannot be."""
    start()
    os.environ["CXX"] = "no-such-compiler"  # only now: DeepSpeed builds an operator of its own at the start
    result = _caught(lambda: _engine(Plain(), ds_config(3, ort=True)))
    plain = _engine(Plain(), ds_config(3, ort=None))
    result["plain"] = _caught(lambda: plain.backward(plain(torch.randn(4, 6)).sum()))
    return result


def typo() -> dict[str, Any]:
    """Misspell a key of the section."""
    start()
    config = ds_config(1, ort=True)
    config["ort_zero"]["ortmodule"]["fallbak"] = "warn"
    return _caught(lambda: _engine(Plain(), config))


def fall_back(stage: int, name: str) -> dict[str, Any]:
    """Train a model that cannot be exported with ``"fallback": "warn"``, and the same one in PyTorch."""
    start()
    losses = {}
    for kind in ("torch", "warn"):
        config = ds_config(stage, ort=kind == "warn", lr=1e-2, stage3_param_persistence_threshold=0)
        if kind == "warn":
            config["ort_zero"]["ortmodule"]["fallback"] = "warn"
        torch.manual_seed(0)
        engine = _engine(MODELS[name](), config)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
        losses[kind] = []
        for _ in range(4):
            loss = engine(x).square().sum()
            engine.backward(loss)
            engine.step()
            losses[kind].append(loss.item())
    return {"losses": losses, "status": ort_zero.status()}


def raising_hook() -> dict[str, Any]:
    """Raise from a gradient hook, that is from inside a node of the graph, on every rank."""
    start()
    model = Plain()
    engine = _engine(model, ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)
    engine.backward(engine(x).sum())
    engine.step()

    def hook(grad):
        raise ZeroDivisionError("the hook of a user")

    handle = model.a.weight.register_hook(hook)
    result = _caught(lambda: engine.backward(engine(x).sum()))
    handle.remove()
    result["in_flight"] = [p.ds_status.name for p in model.parameters() if p.ds_status.name != "NOT_AVAILABLE"]
    return result


def freeze(where: str) -> dict[str, Any]:
    """Freeze a layer after the first step, on every rank or on rank 1 only."""
    rank = start()
    model = Plain()
    engine = _engine(model, ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)

    def step():
        engine.backward(engine(x).sum())
        engine.step()

    step()
    if where == "all" or rank == 1:
        model.b.requires_grad_(False)
    result = _caught(step)
    model.b.requires_grad_(True)
    result["then"] = _caught(step)["text"]
    result["graph"] = ort_zero.status()["models"][0]["graphs"]["training"]
    return result


def exports_again(times: int) -> dict[str, Any]:
    """Make ORT export again and again; nothing of the old graphs may stay."""
    import gc

    from ort_zero.bridge import ops

    start()
    engine = _engine(Plain(), ds_config(3, ort=True, stage3_param_persistence_threshold=0))
    x = torch.randn(4, 6)
    for i in range(times):
        engine.backward(engine(x, x if i % 2 else None).sum())
        engine.step()
    gc.collect()
    alive = ops.live_tables()
    status = ort_zero.status()["models"][0]
    engine.destroy()
    del engine
    gc.collect()
    return {"alive": alive, "after": ops.live_tables(), "status": status, "models": len(ort_zero.status()["models"])}
