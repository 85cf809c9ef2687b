"""Connect the engines and wrapped models of a script to the recorder of ``ort-zero profile``, if it runs the script."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ort_zero import config, env
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.profiling import exchange
from ort_zero.profiling.recorder import Recorder
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


@functools.cache
def recorder() -> Recorder | None:
    """Return the recorder of this process; None unless ``ort-zero profile`` has started the process."""
    asked = env.request(env.PROFILE)
    return None if asked is None else Recorder(asked, _node_profiles)


def _node_profiles(prefix: str) -> Any:
    """Have new sessions record their nodes, into files that begin with `prefix`."""
    from ort_zero.runtimes.sessions import SessionProfiles  # needs ONNX Runtime

    return SessionProfiles(prefix)


def in_torch() -> bool:
    """Return whether the script runs in PyTorch for comparison, with every section off."""
    return (env.request(env.PROFILE) or {}).get("backend") == exchange.TORCH


def without_fallback(section: config.Config) -> config.Config:
    """Return the section with ``fallback`` "raise" while a script is measured, else unchanged."""
    if recorder() is None:
        return section
    return section.model_copy(update={"fallback": "raise"})


def measure_engine(engine: Any, runtime: Any = None) -> None:
    """Measure an engine's calls, if the script is measured."""
    if recorder() is None:
        return
    _name_collectives()
    _measure(engine, engine.module if runtime is None else runtime.module, dict if runtime is None else runtime.status)
    for name, method in ((named_ranges.BACKWARD, "backward"), (named_ranges.OPTIMIZER, "step")):
        setattr(engine, method, named_range(name)(getattr(engine, method)))


def measure_model(runtime: Any) -> None:
    """Measure the calls of a model without a DeepSpeed engine, if the script is measured."""
    if recorder() is None:
        return
    if in_torch():
        runtime.fallback_reason = "ort-zero profile measures it in PyTorch"
    _measure(runtime.module, runtime.module, runtime.status)


def _measure(owner: Any, model: Any, status: Any) -> None:
    """Measure the calls of `owner`, an engine or the model itself."""
    active: Any = recorder()
    active.note_model(type(model).__name__, status)
    owner.register_forward_pre_hook(
        lambda called, args: active.call(called, called.training and torch.is_grad_enabled())
    )
    owner.forward = named_range(named_ranges.FORWARD)(owner.forward)


@functools.cache
def _name_collectives() -> None:
    """Record DeepSpeed's own gathers and reduces as named ranges, also in engines that run in PyTorch."""
    for kind, functions in ((named_ranges.GATHER, ds_compat.GATHERS), (named_ranges.REDUCE, ds_compat.REDUCES)):
        for holder, name in ds_compat.existing(functions):
            setattr(holder, name, named_range(kind)(vars(holder)[name]))
