"""What the building of a graph goes through: an exported module, its gradient graph, a graph that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from ort_zero.compat import ortmodule as ort_compat
from ort_zero.recompute.optimizer import Decision
from ort_zero.runtime.export.tracer import Effects
from ort_zero.runtime.guards.keys import ExportedModelInfo, ExportKey, KnownGraph, PostExportProcessedModelInfo
from ort_zero.runtime.zero3 import gather_reduce
from ort_zero.statistics.collect import reader_marks


@dataclass(slots=True, eq=False)
class BuiltModel:
    """What ORT made of an exported module: the gradient graph (training) or forward graph, before any edit of ours."""

    model: onnx.ModelProto
    info: ort_compat.GraphInfo


@dataclass(slots=True, eq=False)
class Exported:
    """A module that has been exported; several graphs may be made of it."""

    key: ExportKey
    info: ExportedModelInfo
    effects: Effects
    differentiable: frozenset[str]
    """Arguments that were traced with gradients."""
    readers: list[reader_marks.GraphReaders] = field(default_factory=list)
    read_alone: frozenset[str] = frozenset()
    """Graph inputs that no result depends on: they are there for subscribers."""


@dataclass(slots=True, eq=False)
class Graph:
    """A graph that can run."""

    known: KnownGraph
    exported: Exported
    info: PostExportProcessedModelInfo
    session: ort_compat.Session
    table: gather_reduce.CollectiveExecutor | None
    digest: str
    """Of the collectives in the graph; ranks with equal digests perform the same ones in one order."""
    bridge: str | None
    nodes: int
    python_ops: int
    memory: Decision | None = None
    """What is computed again in the backward, None if nothing was asked for."""

    @property
    def effects(self) -> Effects:
        """What the module does besides returning a result."""
        return self.exported.effects
