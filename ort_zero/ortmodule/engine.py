"""Run the units of a model through ORTModule's graph builder, as :class:`ort_zero.units.interface.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ort_zero.ortmodule.function import OrtGraphFunction
from ort_zero.ortmodule.graph_compiler import OrtGraphCompiler, Settings
from ort_zero.ortmodule.memory import Recomputation
from ort_zero.ortmodule.records import OrtRecord
from ort_zero.utils.sizes import binary_size


class OrtEngine:
    """Runs the units of one model.

    Args:
        settings: how the model runs.
    """

    name = "ortmodule"
    graph_node = OrtGraphFunction.__name__
    slowdown = 1.3
    compiles_evaluations = True

    def __init__(self, settings: Settings):
        self.settings = settings
        self.record = OrtRecord()
        self.times_units = settings.times_units

    def compiler(self, unit_class: str, exclude: tuple[str, ...]) -> OrtGraphCompiler:
        """Return a new compiler for a class of units."""
        return OrtGraphCompiler(self.settings, self.record, exclude, unit_class)

    def timed_keys(self, unit: nn.Module, unit_class: str) -> list[str] | None:
        """Return the names of the graphs of a unit's class; None before all are built, and if units are not timed."""
        graphs = [graph for graph in self.record.of_unit(unit_class) if graph.direction == "forward"]
        sessions = [session for graph in graphs for session in graph.sessions().values()]
        is_built = bool(sessions) and all(graph.sessions() or graph.reason for graph in graphs)
        return sorted({session.key for session in sessions}) if is_built and self.times_units else None

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if PyTorch runs all graphs of a unit's class: the unit then runs without Dynamo's guards."""
        graphs = self.record.of_unit(unit_class)
        if graphs and all(graph.reason is not None for graph in graphs):
            self.record.leave_to_torch(unit_class, str(graphs[0].reason))
        return unit_class in self.record.units_in_torch

    def end_first_step(self, status: Callable[[], dict[str, Any]]) -> bool:
        """Return False: the units are not compiled again."""
        return False

    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once it is decided which units stay."""
        return units_are_settled or not self.times_units

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the engine's own keys of the model's entry in ``ort_zero.status()``."""
        record = self.record.as_dict()
        in_ort = record["graphs"] - record["graphs_in_torch"]
        return {
            "backend": "onnxruntime" if in_ort else "torch" if record["graphs"] else "not called yet",
            "sessions": sum(len(graph.sessions()) for graph in self.record.graphs),
            "in_torch": {f"{g.unit}, graph {g.number}": g.reason for g in self.record.graphs if g.reason is not None},
            "compiled": {**record, "settled": self.is_settled(units_are_settled)},
            "memory": [asdict(each) for each in self._recomputations()],
        }

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return rows of the summary: each configuration of upstream's table that is applied, and what it saves."""
        return [
            (f"{each.unit}: {entry.configuration}", f"-{binary_size(entry.saved_bytes)} a forward")
            for each in self._recomputations()
            for entry in each.entries
        ]

    def _recomputations(self) -> list[Recomputation]:
        return [graph.recomputation for graph in self.record.graphs if graph.recomputation is not None]
