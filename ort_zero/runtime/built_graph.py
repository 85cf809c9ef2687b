"""What the building of a graph passes on: an exported module, the gradient graph of it, a graph that can run.

:mod:`ort_zero.runtime.graph_builder` makes them; the transitions and the export cache keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from ort_zero.compat import ortmodule as ort_compat
from ort_zero.recompute.decision import Decision
from ort_zero.runtime.export.tracer import Effects
from ort_zero.runtime.guards.keys import ExportedModelInfo, ExportKey, KnownGraph, PostExportProcessedModelInfo
from ort_zero.runtime.zero3 import gather_reduce
from ort_zero.statistics.collect import reader_marks


@dataclass(slots=True, eq=False)
class BuiltModel:
    """What ORT builds from an exported module: the gradient graph, or for inference the forward graph, unedited."""

    model: onnx.ModelProto
    info: ort_compat.GraphInfo


@dataclass(slots=True, eq=False)
class ExportedModule:
    """A module that has been exported; several graphs may be built from it."""

    key: ExportKey
    info: ExportedModelInfo
    effects: Effects
    differentiable: frozenset[str]
    """Arguments that were traced with gradients."""
    readers: list[reader_marks.GraphReaders] = field(default_factory=list)
    """One for each subscriber that reads values in the graph."""
    only_read: frozenset[str] = frozenset()
    """Graph inputs that no result depends on: they are there for subscribers."""


@dataclass(slots=True, eq=False)
class BuiltGraph:
    """A graph that can run, with the session that runs it."""

    known: KnownGraph
    exported: ExportedModule
    info: PostExportProcessedModelInfo
    session: ort_compat.Session
    executor: gather_reduce.CollectiveExecutor | None
    digest: str
    """Of the collectives in the graph; ranks with equal digests perform the same ones in one order."""
    bridge: str | None
    """The collectives in the graph, for people; None without any."""
    nodes: int
    python_ops: int
    """Nodes that run Python code: operators in PyTorch, gathers and reduces, readers."""
    memory: Decision | None = None
    """What the backward computes again; None if the configuration asks for no recomputation."""

    @property
    def effects(self) -> Effects:
        """What the module does besides returning a result."""
        return self.exported.effects
