"""Run the units of a model through ORTModule's graph builder, as :class:`ort_zero.units.engine.Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ort_zero.ortmodule.function import OrtGraphFunction
from ort_zero.ortmodule.graph_compiler import OrtGraphCompiler
from ort_zero.ortmodule.memory import Recomputation
from ort_zero.ortmodule.records import OrtGraphRecord
from ort_zero.ortmodule.settings import Settings
from ort_zero.runtimes.runner import Runner
from ort_zero.units.engine import Engine
from ort_zero.utils.sizes import binary_size


class OrtEngine(Engine[OrtGraphRecord]):
    """Runs the units of one model.

    Args:
        settings: how the model runs.
    """

    name = "ortmodule"
    graph_node = OrtGraphFunction.__name__
    slowdown = 1.3
    compiles_evaluations = True

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings

    def compiler(self, unit_class: str, exclude: tuple[str, ...], runner: Runner | None = None) -> OrtGraphCompiler:
        """Return a new compiler for a class of units."""
        return OrtGraphCompiler(self, unit_class, exclude)

    def timed_keys(self, unit: nn.Module, unit_class: str) -> list[str] | None:
        """Return the names of the graphs of a unit's class; None before all are built, and if units are not timed."""
        graphs = [graph for graph in self.graphs_of(unit_class) if graph.direction == "forward"]
        sessions = [session for graph in graphs for session in graph.sessions().values()]
        is_built = bool(sessions) and all(graph.sessions() or graph.reason for graph in graphs)
        return sorted({session.key for session in sessions}) if is_built and self.settings.times_units else None

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if PyTorch runs all graphs of a unit's class: the unit then runs without Dynamo's guards."""
        graphs = self.graphs_of(unit_class)
        if graphs and all(graph.reason is not None for graph in graphs):
            self.leave_to(Runner.TORCH, unit_class, str(graphs[0].reason))
        return unit_class in self.units_in_torch

    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once it is decided which units stay."""
        return units_are_settled or not self.settings.times_units

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the engine's own keys of the model's entry in ``ort_zero.status()``."""
        in_torch = [graph for graph in self.graphs if graph.reason is not None]
        in_ort = len(self.graphs) - len(in_torch)
        return {
            "backend": "onnxruntime" if in_ort else "torch" if self.graphs else "not called yet",
            "sessions": sum(len(graph.sessions()) for graph in self.graphs),
            "in_torch": {f"{graph.unit}, graph {graph.number}": graph.reason for graph in in_torch},
            "compiled": {**self.as_dict(), "settled": self.is_settled(units_are_settled)},
            "memory": [asdict(each) for each in self._recomputations()],
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {
            **self.figures(),
            "graphs_in_torch": sum(graph.reason is not None for graph in self.graphs),
            "session_runs": self.session_runs(),
            "nodes": sum(session.nodes for graph in self.graphs for session in graph.sessions().values()),
            "kept_bytes": sum(graph.halves.kept_bytes for graph in self.graphs if graph.halves is not None),
            "checked_runs": sum(graph.checked_runs for graph in self.graphs),
            "build_seconds": sum(graph.build_seconds for graph in self.graphs),
            "check_seconds": sum(graph.check_seconds for graph in self.graphs),
            "flop_share": self.share(),
        }

    def share(self) -> float | None:
        """Return ONNX Runtime's share of the floating-point operations of one run of each graph; None without any."""
        in_ort = [graph for graph in self.graphs if graph.reason is None and graph.unit not in self.units_in_torch]
        total = sum(graph.flops for graph in self.graphs)
        return sum(graph.flops for graph in in_ort) / total if total else None

    def session_runs(self) -> dict[str, int]:
        """Return how often sessions have run, by direction; the runs of checks are among them."""
        runs = {"forward": 0, "backward": 0, "inference": 0}
        for graph in self.graphs:
            for direction, session in graph.sessions().items():
                runs[direction] += session.runs
        return runs

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return rows of the summary: each configuration of upstream's table that is applied, and what it saves."""
        return [
            (f"{each.unit}: {entry.configuration}", f"-{binary_size(entry.saved_bytes)} a forward")
            for each in self._recomputations()
            for entry in each.entries
        ]

    def _recomputations(self) -> list[Recomputation]:
        return [graph.recomputation for graph in self.graphs if graph.recomputation is not None]
