"""Connect the engines and wrapped models of a script to the recorder of ``ort-zero profile``, if it runs the script."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from ort_zero import config, env
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.profiling import exchange
from ort_zero.profiling.recorder import Recorder
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


@functools.cache
def request() -> exchange.ProfileRequest | None:
    """Return what ``ort-zero profile`` asks of this process; None unless it has started the process."""
    path = env.request_file(env.PROFILE)
    return None if path is None else exchange.ProfileRequest(**json.loads(path.read_text(encoding="utf-8")))


_recorders: list[Recorder] = []


def recorder() -> Recorder | None:
    """Return the recorder of this process; None unless ``ort-zero profile`` has started the process."""
    asked = request()
    if asked is None:
        return None
    if not _recorders:
        _recorders.append(Recorder(asked, _node_profiles))
    return _recorders[0]


def _node_profiles(prefix: str) -> Any:
    """Have new sessions record their nodes, into files that begin with `prefix`."""
    from ort_zero.runtimes.sessions import SessionProfiles  # needs ONNX Runtime

    return SessionProfiles(prefix)


def in_torch() -> bool:
    """Return whether the script runs in PyTorch for comparison, with every section off."""
    asked = request()
    return asked is not None and asked.backend == exchange.TORCH


def without_fallback(section: config.Config) -> config.Config:
    """Return the section with ``fallback`` "raise" while a script is measured, else unchanged."""
    if recorder() is None:
        return section
    return section.model_copy(update={"fallback": "raise"})


def measure_engine(engine: Any, runtime: Any = None) -> None:
    """Measure an engine's calls, if the script is measured."""
    active = recorder()
    if active is None:
        return
    status = runtime.status if runtime is not None else dict
    active.note_model(type(runtime.module if runtime is not None else engine.module).__name__, status)
    _name_collectives()
    engine.register_forward_pre_hook(
        lambda called, args: active.call(called, called.training and torch.is_grad_enabled())
    )
    for name, method in (
        (named_ranges.FORWARD, "forward"), (named_ranges.BACKWARD, "backward"), (named_ranges.OPTIMIZER, "step")
    ):  # fmt: skip
        setattr(engine, method, named_range(name)(getattr(engine, method)))


def measure_model(runtime: Any) -> None:
    """Measure the calls of a model without a DeepSpeed engine, if the script is measured."""
    active = recorder()
    if active is None:
        return
    active.note_model(type(runtime.module).__name__, runtime.status)
    if in_torch():
        runtime.fallback_reason = "ort-zero profile measures it in PyTorch"
    runtime.module.register_forward_pre_hook(
        lambda called, args: active.call(called, called.training and torch.is_grad_enabled())
    )
    runtime.module.forward = named_range(named_ranges.FORWARD)(runtime.module.forward)


@functools.cache
def _name_collectives() -> None:
    """Record DeepSpeed's own gathers and reduces as named ranges, also in engines that run in PyTorch."""
    for kind, functions in (
        (named_ranges.GATHER, ds_compat.gathers()),
        (named_ranges.REDUCE, ds_compat.reduces()),
    ):
        for holder, name in functions:
            setattr(holder, name, named_range(kind)(vars(holder)[name]))
