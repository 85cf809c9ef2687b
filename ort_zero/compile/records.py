"""Record one compiled graph: segments, operators that PyTorch runs and why, floating-point operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_zero.compile.flops import flops_of
from ort_zero.compile.plan import Plan, TorchCall
from ort_zero.compile.trial import Trial
from ort_zero.runtimes.runner import Runner
from ort_zero.units.engine import UnitGraph

if TYPE_CHECKING:
    from ort_zero.compile.executor import SegmentRunner


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
        return self.trial.candidate is Runner.ONNXRUNTIME and self.trial.runner is not Runner.TORCH


@dataclass(slots=True)
class GraphRecord(UnitGraph):
    """One compiled graph; one of the direction ``loss`` is a product of a head and its loss in chunks."""

    runner: Runner
    """What the graph is compiled for: ``ONNXRUNTIME`` in segments, ``INDUCTOR`` as one segment."""
    segments: list[SegmentRecord]
    in_torch: Counter[str]
    """The operators that PyTorch runs between the segments, with their numbers."""
    reasons: dict[str, str]
    """Why PyTorch runs each of these operators."""
    torch_flops: int

    @property
    def flops(self) -> int:
        """Floating-point operations of one run, of segments and of PyTorch's operators."""
        return self.torch_flops + sum(segment.flops for segment in self.segments)

    def segments_as_dicts(self) -> list[dict[str, Any]]:
        """Return the segments, with the runtime of each, as plain values."""
        return [
            {
                "nodes": segment.nodes,
                "flops": segment.flops,
                "runner": (segment.trial.runner or segment.trial.candidate).value,
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


def graph_record(
    plan: Plan, runners: Sequence[SegmentRunner], direction: str, unit: str, recompile_reason: str | None
) -> GraphRecord:
    """Return the record of a planned graph."""
    calls = [step.node for step in plan.steps if isinstance(step, TorchCall) and step.node in plan.reasons]
    return GraphRecord(
        direction=direction,
        unit=unit,
        recompile_reason=recompile_reason,
        runner=Runner.ONNXRUNTIME,
        segments=[
            SegmentRecord(runner.trial, len(runner.segment.nodes), sum(map(flops_of, runner.segment.nodes)))
            for runner in runners
        ],
        in_torch=Counter(str(node.target) for node in calls),
        reasons={str(node.target): plan.reasons[node] for node in calls},
        torch_flops=sum(map(flops_of, calls)),
    )
