"""Record one graph that this engine runs: where, why not in ONNX Runtime, and what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.function import Halves
from ort_zero.ortmodule.memory import Recomputation
from ort_zero.ortmodule.upstream.sessions import Session
from ort_zero.units.engine import UnitGraph


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
