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
        """Return a function that computes a captured graph: it takes the graph's inputs, and returns its results.

        The call adds to the engine's record: 1 to ``dynamo_graphs``, and one graph for each direction. Each run of the
        returned function calls ``record.note_run``. An exception that a run raises has the attribute
        :data:`ort_zero.units.unit_forward.IN_GRAPH`; the unit then runs in PyTorch. A backward that is the engine's
        own calls ``compiled_backward.running.before``, as it was in the forward, before it reads weights (ZeRO-3).

        Raises:
            ExportError: the engine cannot run the graph, with what and the way out; PyTorch then runs the unit.
        """

    def forward_of(self, unit: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of one unit, called with the unit and its arguments: `compiled`, or a form around it.

        Args:
            unit: the unit.
            compiled: the forward of the unit's class, compiled with this compiler.
        """


class Engine(Protocol):
    """Runs the units of one model."""

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
        """The graphs of the model's units, and their runs; one object as long as the engine lives."""

    @property
    def times_units(self) -> bool:
        """Whether units may go back to PyTorch since they are slower; then a unit is settled once that is decided."""

    def compiler(self, unit_class: str, exclude: tuple[str, ...]) -> GraphCompiler:
        """Return a new compiler, whose `recompilations` the engine's record has too.

        Args:
            unit_class: name of the units' class.
            exclude: paths of submodules, from the unit on, that stay in PyTorch.
        """

    def timed_keys(self, unit: nn.Module, unit_class: str) -> Sequence[str] | None:
        """Return names of the unit's graphs by which a trial of the whole unit is shared; None: it is not timed now.

        The names are the same on all ranks and in all processes where the graphs are.
        """

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if PyTorch runs a unit from now on, without a trial of the whole unit."""

    def end_first_step(self, status: Callable[[], dict[str, Any]]) -> bool:
        """Write what a command asks of the first step; return True if the units must be compiled again.

        Args:
            status: returns the model's entry in ``ort_zero.status()["models"]``.
        """

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the engine's own keys of the model's entry in ``ort_zero.status()["models"]``, as plain values.

        ``backend``, ``sessions``, ``in_torch``, ``memory``, and a key of the engine's with what it alone tells.

        Args:
            units_are_settled: it is decided for each unit whether it stays compiled.
        """

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return rows of the summary: what forwards keep for backwards."""
