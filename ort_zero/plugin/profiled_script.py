"""Connects the engines and ORTModules of a script to the recorder of ``ort-zero profile``, if that runs the script."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ort_zero import config, env
from ort_zero.backends import loading
from ort_zero.compat import deepspeed_collectives
from ort_zero.profiling import exchange
from ort_zero.profiling.recorder import Recorder, in_range
from ort_zero.utils import named_ranges


@functools.cache
def recorder() -> Recorder | None:
    """Return what measures this process; None unless ``ort-zero profile`` has started it.

    Raises:
        ProfileError: the file that the environment names cannot be read.
    """
    path = env.profile_file()
    return None if path is None else Recorder(exchange.read_request(path), loading.load().node_profiles)


def in_torch() -> bool:
    """Return whether this run of the script is the one in PyTorch, for which every section is off."""
    found = recorder()
    return found is not None and found.request.backend == exchange.TORCH


def without_fallback(section: config.Config) -> config.Config:
    """Return a section that runs nothing in PyTorch unnoticed, while a script is measured."""
    if recorder() is None:
        return section
    return section.model_copy(update={"ortmodule": section.ortmodule.model_copy(update={"fallback": "raise"})})


def measure_engine(engine: Any, runtime: Any = None) -> None:
    """Have an engine's calls measured, if the script is.

    Args:
        engine: DeepSpeed's.
        runtime: runs its model in ONNX Runtime; None in PyTorch.
    """
    found = recorder()
    if found is None:
        return
    found.model_is_there(type(runtime.module if runtime is not None else engine.module).__name__)
    _name_collectives()
    if runtime is not None:
        runtime.graph_recorder = found.graph_recorder
    engine.register_forward_pre_hook(
        lambda called, args: found.call(called, called.training and torch.is_grad_enabled())
    )
    for name, method in (
        (named_ranges.FORWARD, "forward"), (named_ranges.BACKWARD, "backward"), (named_ranges.OPTIMIZER, "step")
    ):  # fmt: skip
        setattr(engine, method, in_range(name, getattr(engine, method)))


def measure_model(runtime: Any) -> None:
    """Have the calls of a model without an engine measured, if the script is."""
    found = recorder()
    if found is None:
        return
    found.model_is_there(type(runtime.module).__name__)
    if in_torch():
        runtime.fallback_reason = "ort-zero profile measures it in PyTorch"
    else:
        runtime.graph_recorder = found.graph_recorder
    call = in_range(named_ranges.FORWARD, runtime.call)

    def measured(managers: Any, args: tuple, kwargs: dict, run_in_torch: Any) -> Any:
        found.call(runtime, runtime.module.training and torch.is_grad_enabled())
        return call(managers, args, kwargs, run_in_torch)

    runtime.call = measured


@functools.cache
def _name_collectives() -> None:
    """Have DeepSpeed's own gathers and reduces recorded as ranges, those of engines in PyTorch too."""
    for kind, functions in (
        (named_ranges.GATHER, deepspeed_collectives.gathers()),
        (named_ranges.REDUCE, deepspeed_collectives.reduces()),
    ):
        for holder, name in functions:
            setattr(holder, name, in_range(kind, vars(holder)[name]))
