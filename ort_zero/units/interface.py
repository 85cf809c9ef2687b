"""Declare what an engine that runs the units of a model offers: a captured graph goes in, a callable comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.fx import GraphModule

from ort_zero.units.recompilations import Recompilations
from ort_zero.units.records import UnitsRecord


class GraphCompiler(Protocol):
    """Compiles the graphs of one class of units; Dynamo calls it once for each graph that it captures."""

    recompilations: Recompilations
    """The reasons for the graphs, told by Dynamo's guards; ``note_graph()`` returns the reason for the newest graph."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Return a function that takes the inputs of a captured graph, and returns the graph's results.

        The call enters the graph in the engine's record, and each run calls ``record.note_run``. An exception of a run
        gets the attribute :data:`ort_zero.units.unit_forward.IN_GRAPH`; PyTorch then runs the unit. A backward first
        calls what ``compiled_backward.running.before`` was in its forward: ZeRO-3 makes the weights whole.

        Raises:
            ExportError: the engine cannot run the graph; PyTorch then runs the unit.
        """

    def forward_of(self, unit: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of one unit: the compiled forward of the unit's class, or a form around it."""


class Engine(Protocol):
    """Runs the units of one model. Units are named by the names of their classes."""

    name: str
    """The engine's name in ``ort_zero.status()``: ``compile`` or ``ortmodule``."""
    graph_node: str
    """What the names of the autograd nodes of the engine's graphs begin with, such as ``CompiledFunction``."""
    slowdown: float
    """A unit stays compiled while it takes at most this multiple of its time in PyTorch, forward and backward."""
    compiles_evaluations: bool
    """Whether calls without gradients are compiled from the first one on, not only where long evaluations repay it."""

    @property
    def record(self) -> UnitsRecord[Any]:
        """The graphs of the model's units, and their runs."""

    def compiler(self, unit_class: str, exclude: tuple[str, ...]) -> GraphCompiler:
        """Return a new compiler, whose `recompilations` the record has too; `exclude` is ``Unit.excluded``."""

    def timed_keys(self, unit: nn.Module, unit_class: str) -> Sequence[str] | None:
        """Return names of the unit's graphs, equal on all ranks and in all processes; None: it is not timed now."""

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if PyTorch runs a unit from now on, without a trial of the whole unit."""

    def end_first_step(self, status: Callable[[], dict[str, Any]]) -> bool:
        """Write what a command asks of the first step and its status; return True to have the units compiled again."""

    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once it is decided where everything runs; `units_are_settled` as for :meth:`status`."""

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the keys of the model's entry that are the engine's own: ``backend``, ``in_torch`` and others.

        `units_are_settled` is True once each timed unit stays compiled or is back in PyTorch.
        """

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return rows of the summary: what forwards keep for backwards."""
