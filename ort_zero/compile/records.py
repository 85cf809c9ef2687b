"""Record what was compiled: graphs, segments, operators that PyTorch runs and why, floating-point operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ort_zero.compile.flops import flops_of
from ort_zero.compile.memory import MemoryBudget
from ort_zero.compile.plan import Plan, TorchCall
from ort_zero.compile.trial import Trial
from ort_zero.units.agreement import Runner
from ort_zero.units.records import UnitGraph, UnitsRecord

if TYPE_CHECKING:
    from ort_zero.compile.executor import SegmentRunner


_MIN_SHARE = 0.1
"""Share of a unit's operations in ONNX Runtime below which Dynamo's and AOTAutograd's time is not worth it."""
_MIN_GAIN = 4e-4
"""Seconds that Dynamo's guards, AOTAutograd's code and calls of operators from Python take in a forward and a backward
of a unit: 0.25 to 0.5 ms in layers of five architectures that are too small for any other time."""


@dataclass(slots=True)
class SegmentRecord:
    """One segment of a graph."""

    trial: Trial
    nodes: int
    flops: int
    """Floating-point operations of one run, by torch's counter, with the sizes of the first call."""

    @property
    def in_ort(self) -> bool:
        """Whether ONNX Runtime runs the segment."""
        return self.trial.runner is not Runner.TORCH


@dataclass(slots=True)
class GraphRecord(UnitGraph):
    """One compiled graph; one of the direction ``loss`` is a product of a head and its loss in chunks."""

    segments: list[SegmentRecord]
    in_torch: Counter[str]
    """The operators that PyTorch runs between the segments, with their numbers."""
    reasons: dict[str, str]
    """Why PyTorch runs each of these operators."""
    torch_flops: int

    def segments_as_dicts(self) -> list[dict[str, Any]]:
        """Return the segments, with the runtime of each, as plain values."""
        return [
            {
                "nodes": segment.nodes,
                "flops": segment.flops,
                "runner": "onnxruntime" if segment.in_ort else "torch",
                "reason": segment.trial.reason,
            }
            for segment in self.segments
        ]

    def calls_in_torch(self) -> list[tuple[str, int, str]]:
        """Return the operators that PyTorch runs between the segments, with their numbers and the reasons."""
        return [(name, self.in_torch[name], why) for name, why in self.reasons.items()]

    def text(self) -> str:
        """Return the graph in a line: direction, segments, operators that PyTorch runs, and why the graph was made."""
        parts = [f"{self.direction}: {len(self.segments)} segments"]
        parts += [f"{segment.trial.key} of {segment.nodes} nodes" for segment in self.segments]
        parts += [f"in PyTorch: {', '.join(self.in_torch)}"] if self.in_torch else []
        return "; ".join(parts) + (f"; made since {self.recompile_reason}" if self.recompile_reason else "")


@dataclass(slots=True)
class ModelRecord(UnitsRecord[GraphRecord]):
    """What was compiled for one model. PyTorch runs units whole if ONNX Runtime runs or saves too little of them."""

    losses: int = 0
    """Number of losses that were computed without all logits, outside of graphs."""
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    """What forwards keep for backwards."""

    def note_loss(self) -> None:
        """Count a loss that was computed without all logits."""
        self.losses += 1

    def goes_to_torch(self, unit: str) -> bool:
        """Return True if PyTorch runs all units of a class from now on; once True, the answer stays True."""
        reason = self.why_in_torch(unit)
        if reason is not None:
            self.leave_to_torch(unit, reason)
        return unit in self.units_in_torch

    def why_in_torch(self, unit: str) -> str | None:
        """Return why ONNX Runtime does or saves too little of a class of units; None if not, or not placed yet."""
        graphs = self._graphs_of(unit)
        segments = [segment for graph in graphs for segment in graph.segments]
        if self.placed_segments(unit) is None:
            return None
        total = sum(graph.torch_flops for graph in graphs) + sum(segment.flops for segment in segments)
        calls = sum(graph.direction != "backward" for graph in graphs)
        in_ort = [segment.trial for segment in segments if segment.in_ort]
        gains = [trial.gain for trial in in_ort if trial.gain is not None]
        cost = _MIN_GAIN * calls
        if len(gains) == len(in_ort) and sum(gains) < cost:
            return f"ONNX Runtime saves {1e3 * sum(gains):.2f} ms, less than the {1e3 * cost:.2f} ms of compiled code"
        in_ort_flops = sum(segment.flops for segment in segments if segment.in_ort)
        if in_ort_flops <= _MIN_SHARE * total:
            return f"it is faster for {100 * (1 - in_ort_flops / max(1, total)):.0f} % of the operations"
        return None

    def placed_segments(self, unit: str) -> list[str] | None:
        """Return the keys of the placed segments of a class of units; None if its units may not go back to PyTorch.

        They may not while segments are to be timed, or if segments never are. With recomputation they never may, since
        PyTorch's own forward keeps all for its backward.
        """
        graphs = self._graphs_of(unit)
        trials = [segment.trial for graph in graphs for segment in graph.segments]
        are_placed = all(trial.runner is not None and trial.place == "measured" for trial in trials)
        if not graphs or not are_placed or self.memory.recompute != "off":
            return None
        return [trial.key for trial in trials]

    @property
    def is_placed(self) -> bool:
        """Whether every segment of the graphs has the runtime that runs it from now on."""
        trials = [segment.trial for graph in self.graphs for segment in graph.segments]
        return bool(self.graphs) and all(trial.runner is not None for trial in trials)

    def _graphs_of(self, unit: str) -> list[GraphRecord]:
        return [graph for graph in self.graphs if graph.unit == unit and graph.direction != "loss"]

    def flop_share(self) -> float | None:
        """Return the share of floating-point operations that ONNX Runtime runs, of one run of each graph."""
        ort = sum(segment.flops for segment in self._segments_in_ort())
        total = sum(g.torch_flops + sum(s.flops for s in g.segments) for g in self.graphs)
        return ort / total if total else None

    def _segments_in_ort(self) -> list[SegmentRecord]:
        running = (g for g in self.graphs if g.direction == "loss" or g.unit not in self.units_in_torch)
        return [segment for graph in running for segment in graph.segments if segment.in_ort]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        segments = [segment for graph in self.graphs for segment in graph.segments]
        trials = {id(segment.trial): segment.trial for segment in segments}.values()
        return {
            "graphs": len(self.graphs),
            "dynamo_graphs": self.dynamo_graphs,
            "losses_in_chunks": self.losses,
            "segments": len(segments),
            "segments_in_torch": len(segments) - len(self._segments_in_ort()),
            "runs": sum(trial.runs for trial in trials),
            "checked_runs": sum(trial.checks for trial in trials),
            "check_seconds": sum(trial.check_seconds for trial in trials),
            "flop_share": self.flop_share(),
            "in_torch": dict(sum((graph.in_torch for graph in self.graphs), Counter())),
            "reasons": {name: why for graph in self.graphs for name, why in graph.reasons.items()},
            "units_in_torch": dict(self.units_in_torch),
            "units_at_limit": [each.unit for each in self.recompilations if each.at_limit],
            "recompilations": [reason for g in self.graphs if (reason := g.recompile_reason)],
            "failed": {s.trial.key: s.trial.reason for s in segments if s.trial.failed},
        }


def graph_record(
    plan: Plan, runners: Sequence[SegmentRunner], direction: str, unit: str, recompile_reason: str | None
) -> GraphRecord:
    """Return the record of a planned graph."""
    calls = [step.node for step in plan.steps if isinstance(step, TorchCall) and step.node in plan.reasons]
    return GraphRecord(
        direction=direction,
        unit=unit,
        recompile_reason=recompile_reason,
        segments=[
            SegmentRecord(runner.trial, len(runner.segment.nodes), sum(map(flops_of, runner.segment.nodes)))
            for runner in runners
        ],
        in_torch=Counter(str(node.target) for node in calls),
        reasons={str(node.target): plan.reasons[node] for node in calls},
        torch_flops=sum(map(flops_of, calls)),
    )
