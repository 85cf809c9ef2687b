"""The compile backend, as :class:`ort_zero.backends.interface.Backend` declares it.

Nothing heavy is imported at module level: the plugin asks for :func:`import_hooks` within ``import torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ort_zero.errors import ConfigError

if TYPE_CHECKING:
    from ort_zero import config
    from ort_zero.backends.interface import (
        Examination,
        NodeProfiles,
        OnModelWrapped,
    )
    from ort_zero.units.running_model import UnitsModel


def import_hooks(on_wrapped: OnModelWrapped) -> dict[str, Callable[[Any], None]]:
    """Return an empty dict: no function need be called after imports of plain onnxruntime."""
    return {}


def refuse(ds_config: Mapping[str, Any]) -> None:
    """Refuse nothing: what ONNX Runtime cannot run, PyTorch runs."""


def run_for_engine(model: Any, section: config.Config, zero: Mapping[str, Any]) -> UnitsModel:
    """Compile the units of `model` in place for a DeepSpeed engine; return what runs the model."""
    stage, max_elements = int(zero.get("stage", 0)), section.compile.max_unit_elements
    from ort_zero.backends import registry
    from ort_zero.compat import deepspeed_units, gloo_collectives, torch_adam, versions

    versions.say_untested(versions.require("compile"))  # before the imports below, which need onnx
    from ort_zero.compile.deferred_logits import is_head
    from ort_zero.compile.engine import CompileEngine
    from ort_zero.compile.memory import MemoryBudget
    from ort_zero.compile.settings import Settings
    from ort_zero.units.finding import find_units
    from ort_zero.units.running_model import UnitsModel

    if stage == 3 and max_elements is None:
        max_elements = deepspeed_units.max_gathered_elements(model, zero)
    settings = Settings(
        verify=section.compile.verify,
        place=section.compile.place,
        fuse_loss=section.compile.fuse_loss,
        save_onnx=section.save_onnx,
        reproducers=section.compile.reproducers,
    )
    alone: Any = {"stands_alone": is_head} if settings.loss_devices else {}
    units = find_units(model, exclude=section.exclude, max_elements=max_elements, **alone)
    compile_engine = CompileEngine(settings, MemoryBudget(section.memory.recompute, section.memory.budget))
    running = UnitsModel(model, compile_engine, units, stage, section.fallback == "raise")
    if stage == 3:
        registry.apply("gathers in units", deepspeed_units.patches)
        deepspeed_units.gather_together(unit.module for unit in units)
    if stage:
        registry.apply("collectives without copies", gloo_collectives.patches)
        registry.apply("updates in pieces", torch_adam.patches)
    registry.register(running)
    return running


def connect(running: Any, engine: Any) -> None:
    """Prepare a new DeepSpeed engine for compiled units: the order of gradients, the sizes of buckets, kept memory.

    The optimizer gets the gradients in one order on all ranks, and the process keeps freed memory for the next step.
    The step whose operations DeepSpeed's flops profiler counts runs in PyTorch: the profiler counts calls of Python.
    """
    from ort_zero.compat import deepspeed, deepspeed_buckets, deepspeed_gradient_order, deepspeed_units, glibc

    running.stage = int(engine.zero_optimization_stage())
    if running.stage == 3:
        deepspeed_units.prefetch_less(engine, running.unit_modules())
    glibc.keep_freed_memory()
    deepspeed_buckets.bound_buckets(engine)  # whatever glibc does here: a bucket has one size on all ranks
    if running.stage:
        deepspeed_buckets.require_equal_sizes(engine, running.unit_modules())
    deepspeed_gradient_order.keep_order(engine.optimizer, running.unit_modules())
    if engine.flops_profiler_enabled():
        is_counted = deepspeed.flops_are_counted(engine)
        engine.module.register_forward_pre_hook(lambda module, args: running.suspend(is_counted()), prepend=True)


def run_alone(model: Any, section: config.Config) -> UnitsModel:
    """Compile the units of `model` in place, for training without DeepSpeed; return what runs the model.

    From now on the process keeps freed memory for the next step.
    """
    from ort_zero.compat import glibc

    glibc.keep_freed_memory()
    return run_for_engine(model, section, {})


def node_profiles(prefix: str) -> NodeProfiles:
    """Have new sessions record their nodes, into files that begin with `prefix`."""
    from ort_zero.compile.node_profiles import SessionProfiles

    return SessionProfiles(prefix)


def build(force: bool) -> Any:
    """Raise ConfigError: there is nothing to compile."""
    raise ConfigError("the compile backend has no compiled parts; ort-zero build is for onnxruntime-training")


def examine() -> Examination:
    """Return that nothing of ours needs a compiler."""
    from ort_zero.backends.interface import Examination

    return Examination(built=True)
