"""The compile backend, as :class:`ort_zero.runtimes.interface.Backend` declares it; imports nothing heavy itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_zero import config
    from ort_zero.runtimes.interface import Examination
    from ort_zero.units.running_model import UnitsModel


def run(model: Any, section: config.Config, ds_config: Mapping[str, Any]) -> UnitsModel:
    """Compile the units of `model` in place; return what runs the model."""
    zero, max_elements = ds_config.get("zero_optimization") or {}, section.compile.max_unit_elements
    stage = int(zero.get("stage", 0))
    from ort_zero.compat import deepspeed_units, versions

    versions.say_untested(versions.require("compile"))  # before the imports below, which need onnx
    from ort_zero.compile.deferred_logits import is_head
    from ort_zero.compile.engine import CompileEngine
    from ort_zero.compile.memory import MemoryBudget
    from ort_zero.compile.settings import Settings
    from ort_zero.units.finding import find_units
    from ort_zero.units.installation import install

    if stage == 3 and max_elements is None:
        max_elements = deepspeed_units.max_gathered_elements(model, zero)
    settings = Settings(**section.compile.model_dump(), save_onnx=section.save_onnx)
    alone: Any = {"stands_alone": is_head} if settings.loss_devices else {}
    units = find_units(model, exclude=section.exclude, max_elements=max_elements, **alone)
    compile_engine = CompileEngine(settings, MemoryBudget(section.memory.recompute, section.memory.budget))
    return install(model, compile_engine, units, stage, section.fallback == "raise")


def examine() -> Examination:
    """Return that nothing of ours needs a compiler."""
    from ort_zero.runtimes.interface import Examination

    return Examination(built=True)
