"""Record the graphs of a model that this engine runs: where, why not in ONNX Runtime, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.function import Halves
from ort_zero.ortmodule.memory import Recomputation
from ort_zero.ortmodule.upstream.sessions import Session
from ort_zero.units.records import UnitGraph, UnitsRecord


@dataclass(slots=True, kw_only=True)
class OrtGraphRecord(UnitGraph):
    """One graph of Dynamo."""

    number: int
    flops: int = 0
    """Floating-point operations of one forward, by torch's counter, with the sizes of the first call."""
    reason: str | None = None
    """Why PyTorch runs the graph; None while ONNX Runtime does."""
    halves: Halves | None = None
    """The sessions of forward and backward; None before the first run, and without a backward."""
    inference: Session | None = None
    """The session of a graph without a backward."""
    recomputation: Recomputation | None = None
    """What the backward computes again; None unless the section asks for that."""
    build_seconds: float = 0.0
    check_seconds: float = 0.0
    checked_runs: int = 0

    def sessions(self) -> dict[str, Session]:
        """Return the graph's sessions by direction."""
        if self.halves is not None:
            return {"forward": self.halves.forward, "backward": self.halves.backward}
        return {} if self.inference is None else {"inference": self.inference}

    def segments_as_dicts(self) -> list[dict[str, Any]]:
        """Return the halves of the graph, with the runtime of each, as plain values."""
        if self.reason is not None:
            return [{"nodes": 0, "flops": self.flops, "runner": "torch", "reason": self.reason}]
        return [
            {"nodes": session.nodes, "flops": self.flops, "runner": "onnxruntime", "reason": ""}
            for session in self.sessions().values()
        ]

    def calls_in_torch(self) -> list[tuple[str, int, str]]:
        """Return the graph itself, with the reason, where PyTorch runs the graph."""
        return [] if self.reason is None else [(f"graph {self.number}", 1, self.reason)]


@dataclass(slots=True)
class OrtRecord(UnitsRecord[OrtGraphRecord]):
    """The graphs of one model that Dynamo captured for this engine, and what their sessions ran."""

    def of_unit(self, unit_class: str) -> list[OrtGraphRecord]:
        """Return the graphs of a class of units."""
        return [graph for graph in self.graphs if graph.unit == unit_class]

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

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        in_torch = [graph for graph in self.graphs if graph.reason is not None]
        return {
            "graphs": len(self.graphs),
            "graphs_in_torch": len(in_torch),
            "dynamo_graphs": self.dynamo_graphs,
            "session_runs": self.session_runs(),
            "nodes": sum(session.nodes for graph in self.graphs for session in graph.sessions().values()),
            "kept_bytes": sum(graph.halves.kept_bytes for graph in self.graphs if graph.halves is not None),
            "checked_runs": sum(graph.checked_runs for graph in self.graphs),
            "build_seconds": sum(graph.build_seconds for graph in self.graphs),
            "check_seconds": sum(graph.check_seconds for graph in self.graphs),
            "flop_share": self.share(),
            "units_in_torch": dict(self.units_in_torch),
            "units_at_limit": [each.unit for each in self.recompilations if each.at_limit],
            "recompilations": [reason for graph in self.graphs if (reason := graph.recompile_reason)],
        }
