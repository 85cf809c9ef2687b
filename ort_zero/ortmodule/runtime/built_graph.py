"""What the building of a graph passes on: an exported module, the gradient graph of it, a graph that can run.

:mod:`ort_zero.ortmodule.runtime.graph_builder` makes them; the transitions and the export cache keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat.torch_onnx import TraceRecord
from ort_zero.ortmodule.recompute.decision import Decision
from ort_zero.ortmodule.runtime.export import structures
from ort_zero.ortmodule.runtime.export.tracer import Effects
from ort_zero.ortmodule.runtime.fused_loss.rewrite import FusedLoss, ReturnedLogits
from ort_zero.ortmodule.runtime.guards.keys import (
    ExportedModelInfo,
    ExportKey,
    KnownGraph,
    PostExportProcessedModelInfo,
)
from ort_zero.ortmodule.runtime.result_dependencies import ResultDependencies
from ort_zero.ortmodule.runtime.zero3 import gather_reduce
from ort_zero.ortmodule.statistics import reader_marks


@dataclass(slots=True, eq=False)
class BuiltModel:
    """What ORT builds from an exported module: the gradient graph, or for inference the forward graph, unedited."""

    model: onnx.ModelProto
    info: ort_compat.GraphInfo
    fused: FusedLoss | None = None
    """What the node of head and loss has changed; None without one."""
    padding_stays: str = ""
    """Why tokens that are padding are computed though they were to be left out; "" where they were not, or are."""


@dataclass(slots=True, eq=False)
class ExportedModule:
    """A module that has been exported; several graphs may be built from it."""

    key: ExportKey
    info: ExportedModelInfo
    effects: Effects
    differentiable: frozenset[str]
    """Names of the arguments that were traced with gradients."""
    readers: list[reader_marks.GraphReaders] = field(default_factory=list)
    """The readers of values in the graph, one object for each subscribed model that reads there."""
    only_read: frozenset[str] = frozenset()
    """Graph inputs that no result depends on: they are there for subscribers."""
    unreached: frozenset[str] = frozenset()
    """Names of the arguments, parameters and buffers that no backward through the results leads to; empty if that is
    not known for all of them."""
    trace: TraceRecord | None = None
    """What was traced, for comparison with other traces of the module; None if it cannot be compared."""
    shares: bool = False
    """Whether the model is the export of another graph."""
    whole: bytes | None = None
    """The model with the caches that this graph does not return, for a graph that does; None if there are none."""


@dataclass(slots=True, eq=False)
class BuiltGraph:
    """A graph that can run, with the session that runs it."""

    known: KnownGraph
    exported: ExportedModule
    info: PostExportProcessedModelInfo
    session: ort_compat.Session
    executor: gather_reduce.CollectiveExecutor | None
    digest: str
    """Digest of the collectives in the graph; ranks with equal digests perform the same ones in one order."""
    collectives: str | None
    """Description of the collectives in the graph for messages; None for a graph without any."""
    nodes: int
    python_ops: int
    """Number of nodes that run Python code: operators in PyTorch, gathers and reduces, readers."""
    memory: Decision | None = None
    """The decision on what the backward computes again; None if the configuration asks for no recomputation."""
    returned_weights: Mapping[int, str] = field(default_factory=dict)
    """Name of the weight or buffer whose memory a result may lie in, by the index of the result."""
    kernels: Mapping[str, int] = field(default_factory=dict)
    """How many nodes run another kernel than ORT's, by the entry of the table of kernels."""

    returned_logits: ReturnedLogits | None = None
    """Where the results are from which the model's logits are computed; None for a graph that returns them."""

    dependencies: ResultDependencies | None = None
    """Which results depend on what; None until somebody wants to know."""

    read_by_backward: frozenset[str] | None = None
    """Names of the inputs whose values the backward reads; None until somebody wants to know."""

    draws_again: Callable[[int], Any] | None = None
    """Returns an agent of the graph whose first run draws what that of :attr:`session` draws in the run of a number."""

    runs_begun: int | None = 0
    """Number of forward runs of the session; None when one has failed, since some nodes have drawn then."""

    surround: Callable[[str, Callable[[], Any]], Any] | None = None
    """Surrounds each half of a run, see :mod:`.run_observer`."""

    @property
    def effects(self) -> Effects:
        """The effects of the module besides the result that it returns."""
        return self.exported.effects

    def result_types(self) -> Iterator[type]:
        """Yield the type of each container, object and constant in the result of the module."""
        yield from structures.types_in(self.info.module_forward_output_schema)
