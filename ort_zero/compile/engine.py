"""Run the units of a model by graphs of AOTAutograd, as :class:`ort_zero.units.interface.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ort_zero import log
from ort_zero.compat.compiled_backward import GRAPH_NODE
from ort_zero.compile import sessions
from ort_zero.compile.deferred_logits import is_head
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.memory import MemoryBudget
from ort_zero.compile.records import ModelRecord
from ort_zero.compile.settings import Settings
from ort_zero.units import explain

_MIN_SHARE = 0.5
"""Share of floating-point operations in ONNX Runtime below which a warning says so."""


class CompileEngine:
    """Runs the units of one model.

    Args:
        settings: how it runs.
        memory: what forwards may keep for backwards; None keeps all.
    """

    name = "compile"
    graph_node = GRAPH_NODE
    slowdown = 1.0

    def __init__(self, settings: Settings, memory: MemoryBudget | None = None):
        self._settings = settings
        self.record = ModelRecord(memory=memory or MemoryBudget())
        self.compiles_evaluations = settings.place == "ort"

    def compiler(self, unit_class: str, exclude: tuple[str, ...]) -> Compiler:
        """Return a new compiler for a class of units."""
        return Compiler(self._settings, self.record, exclude, unit_class)

    def timed_keys(self, unit: nn.Module, unit_class: str) -> list[str] | None:
        """Return the keys of the placed segments of a unit's class; None if it is not to be timed."""
        # the loss that a head makes cheaper is not in the head's own time
        return None if is_head(unit) else self.record.placed_segments(unit_class)

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if ONNX Runtime runs or saves too little of a unit."""
        return not is_head(unit) and self.record.goes_to_torch(unit_class)

    def end_first_step(self, status: Callable[[], dict[str, Any]]) -> bool:
        """Write what a command asks, choose what forwards keep, and warn if ONNX Runtime runs little of the model."""
        memory = self.record.memory
        explain.plan_if_asked(lambda budgets: [memory.plan(budget) for budget in budgets])
        chosen = self.record.memory.is_open and self.record.memory.choose()
        share = self.record.flop_share()
        if share is not None and share < _MIN_SHARE and self._settings.place == "ort":
            log.get_logger().warning(
                "ONNX Runtime runs %.0f %% of the floating-point operations of %s; ort-zero explain says why",
                100 * share,
                status()["module"],
            )
        return chosen

    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once each segment, and each unit that is timed, has the runtime that runs it from now on."""
        times_units = self._settings.place == "measured" and self.record.memory.recompute == "off"
        return self.record.is_placed and (units_are_settled or not times_units)

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the engine's own keys of the model's entry in ``ort_zero.status()``."""
        compiled = self.record.as_dict()
        in_ort = compiled["segments"] - compiled["segments_in_torch"]
        return {
            "backend": "onnxruntime" if in_ort else "torch" if self.record.graphs else "not called yet",
            "sessions": sessions.count(),
            "in_torch": compiled.pop("reasons"),
            "compiled": {**compiled, "settled": self.is_settled(units_are_settled)},
            "memory": [self.record.memory.as_dict()],
        }

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return what forwards keep for backwards, once the budget is chosen."""
        return self.record.memory.summary()
