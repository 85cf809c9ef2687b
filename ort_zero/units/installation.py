"""Put an engine's units into a model, and connect the model to a DeepSpeed engine, for any engine of units."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from ort_zero.compat import deepspeed_gradient_order, deepspeed_units
from ort_zero.runtimes import registry
from ort_zero.units.engine import Engine
from ort_zero.units.finding import Unit
from ort_zero.units.running_model import UnitsModel


def install(model: nn.Module, engine: Engine[Any], units: Sequence[Unit], stage: int, raises: bool) -> UnitsModel:
    """Have an engine run units of a model, in place; under ZeRO-3 DeepSpeed gathers the weights of each unit together.

    Args:
        model: the user's model, before a DeepSpeed engine is made of it.
        stage: ZeRO stage, 0 without an engine of DeepSpeed.
        raises: a compilation that fails raises.
    """
    running = UnitsModel(model, engine, units, stage, raises)
    if stage == 3:
        registry.apply("gathers in units", deepspeed_units.patches)
        deepspeed_units.gather_together(unit.module for unit in units)
    registry.register(running)
    return running


def connect(running: UnitsModel, engine: Any) -> None:
    """Prepare a new DeepSpeed engine for compiled units: the order of gradients, the sizes of prefetches.

    The step whose operations DeepSpeed's flops profiler counts runs in PyTorch: the profiler counts calls of Python.
    """
    running.stage = int(engine.zero_optimization_stage())
    if running.stage == 3:
        deepspeed_units.prefetch_less(engine, running.unit_modules())
    if running.stage:
        deepspeed_units.require_equal_sizes(engine, running.unit_modules())
    deepspeed_gradient_order.keep_order(engine.optimizer, running.unit_modules())
    if engine.flops_profiler_enabled():
        reference = weakref.ref(engine)

        def suspend_while_counted(module: nn.Module, args: Any) -> None:
            live = reference()
            running.suspend(live is not None and live.global_steps == live.flops_profiler_profile_step())

        engine.module.register_forward_pre_hook(suspend_while_counted, prepend=True)
