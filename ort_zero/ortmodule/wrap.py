"""Wrap a user's module so that ONNX Runtime runs it: the ORTModule and the runtime behind it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ort_zero import config, log
from ort_zero.errors import ConfigError


def wrap_model(
    model: Any,
    section: config.OrtModuleConfig,
    stage: int,
    *,
    memory_efficient_gradients: bool = False,
    memory: config.MemoryConfig | None = None,
) -> tuple[Any, Any]:
    """Return the runtime of `model` and the ORTModule around it.

    Args:
        model: the user's module.
        section: how it runs.
        stage: ZeRO stage of its engine, 0 without one.
        memory_efficient_gradients: hand each gradient to its parameter the moment it exists; ZeRO-3 always does.
        memory: what of the activations is computed again.

    Raises:
        ConfigError: a key of `memory` is wrong, or a plan's file is missing on a rank.
        UnsupportedVersionError: torch, Python or onnxruntime-training is out of range.
        BuildError: the C++ extensions cannot be built.
    """
    from ort_zero.ortmodule import patching
    from ort_zero.ortmodule.compat import ortmodule as ort_compat
    from ort_zero.ortmodule.recompute import trial

    memory, section, more = trial.override_section(memory, section)
    request = memory_request(memory) if memory is not None else None
    patching.patch_ortmodule()
    level = log.chosen(section.log_level)

    wrapped = ort_compat.make_ortmodule(model, save_onnx=section.save_onnx, level=level)
    wrap_copy = functools.partial(_wrap_copy, section=section, request=request)
    runtime = attach_runtime(
        wrapped,
        section,
        request,
        wrap_copy,
        stage=stage,
        memory_efficient_gradients=memory_efficient_gradients,
        **more,
    )
    runtime.in_step = True
    return runtime, wrapped


def attach_runtime(
    wrapped: Any,
    section: config.OrtModuleConfig,
    request: Any,
    wrap_copy: Callable[[Any], Any],
    *,
    pickles_itself: bool = False,
    runner_of: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Any:
    """Give an ORTModule the runtime that does its calls, and return the runtime; ``ort_zero.status()`` shows it.

    No other rank is taken to call the model at the same time.

    Args:
        wrapped: the ORTModule.
        section: how it runs.
        request: what of its activations is computed again; None for nothing.
        wrap_copy: wraps a copy of the user's module.
        pickles_itself: a pickle of the ORTModule brings an ORTModule back, not the user's module.
        runner_of: returns what does the calls with the runtime; None for the runtime itself.
        more: further arguments of the runtime.

    Raises:
        ConfigError: a pattern of ``exclude`` matches nothing, or ``cache_dir`` cannot be written to.
    """
    from ort_zero.backends import registry
    from ort_zero.ortmodule.compat import ortmodule as ort_compat
    from ort_zero.ortmodule.runtime.runtime import Runtime

    runtime = Runtime(wrapped.module, section, memory=request, **{"stage": 0, **more})
    runtime.in_step = False
    runner = runner_of(runtime) if runner_of is not None else runtime
    ort_compat.attach(wrapped, runner, wrap_copy, pickles_itself=pickles_itself)
    registry.register(runtime)
    return runtime


def _wrap_copy(model: Any, section: config.OrtModuleConfig, request: Any) -> Any:
    """Return the ORTModule around a copy of a wrapped module: it belongs to no engine and agrees with no ranks."""
    from ort_zero.ortmodule.compat import ortmodule as ort_compat

    # the folder holds the graphs of the model that was copied
    section = section.model_copy(update={"save_onnx": None})
    wrapped = ort_compat.make_ortmodule(model, level=log.chosen(section.log_level))
    wrap_copy = functools.partial(_wrap_copy, section=section, request=request)
    ort_compat.attach(wrapped, _FromFirstCall(wrapped, section, request, wrap_copy), wrap_copy)
    return wrapped


class _FromFirstCall:
    """Runs a copy of a model: makes its runtime when it is called, since many copies never are.

    Args:
        wrapped: ORTModule around the copy.
        section: how it runs.
        request: what of its activations is computed again; None for nothing.
        wrap_copy: wraps a copy of the copy.
    """

    def __init__(self, wrapped: Any, section: config.OrtModuleConfig, request: Any, wrap_copy: Callable[[Any], Any]):
        self._wrapped = weakref.ref(wrapped)  # the wrapper refers to this
        self._section = section
        self._request = request
        self._wrap_copy = wrap_copy

    def call(self, *call: Any) -> Any:
        """Give the call, and all later ones, to a new runtime."""
        from ort_zero.ortmodule.compat import ortmodule as ort_compat

        runtime = attach_runtime(self._wrapped(), self._section, self._request, self._wrap_copy)
        with ort_compat.running(runtime):
            return runtime.call(*call)

    def run_module(self, module: Any, tensors: tuple) -> Any:
        """Never called: only a runtime exports."""
        raise AssertionError("a copy exports through its runtime")

    def current(self, training: bool) -> None:
        """Return None: nothing has run."""


def memory_request(section: config.MemoryConfig) -> Any:
    """Return what the memory optimizer is to do, the same on all ranks.

    Raises:
        ConfigError: on all ranks, if one cannot read the plan or reads another one.
    """
    from ort_zero.distributed.raise_on_all_ranks import RankGroup, default_group
    from ort_zero.ortmodule.recompute import options

    ranks = RankGroup() if section == config.MemoryConfig() else default_group()
    with ranks.raise_on_all("reading the section's memory part", everywhere=ConfigError):
        request = options.read(section)
    plans = ranks.gather(str(request))
    odd = [rank for rank, plan in enumerate(plans) if plan != plans[0]]
    if odd:
        raise ConfigError(
            f"ort_zero.memory.recompute: ranks {odd} read another plan than rank 0; give all ranks one file"
        )
    return request
