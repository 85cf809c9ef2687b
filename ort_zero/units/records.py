"""Record the graphs of a model's units: directions, runs, and the reasons why they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ort_zero import log
from ort_zero.units.recompilations import Recompilations


@dataclass(slots=True)
class UnitGraph:
    """One compiled graph; an engine has a subclass with what it knows of its graphs."""

    direction: str
    """``forward``, ``backward`` or ``inference``; of the compile engine also ``loss``: a product of a head."""
    unit: str
    """Name of the compiled module's class."""
    recompile_reason: str | None
    """Why Dynamo compiled the unit again; None for its first graph."""

    def segments_as_dicts(self) -> list[dict[str, Any]]:
        """Return the graph's parts: nodes, floating-point operations, runner and reason, as plain values."""
        return []

    def calls_in_torch(self) -> list[tuple[str, int, str]]:
        """Return the operators that PyTorch runs besides these parts, with their numbers and the reasons."""
        return []

    def text(self) -> str:
        """Return the graph in a line: the direction, and why the graph was made."""
        return self.direction + (f"; made since {self.recompile_reason}" if self.recompile_reason else "")


Graph = TypeVar("Graph", bound=UnitGraph)


@dataclass(slots=True)
class UnitsRecord(Generic[Graph]):
    """The graphs of one model's units."""

    graphs: list[Graph] = field(default_factory=list)
    dynamo_graphs: int = 0
    """Number of graphs that Dynamo has captured; each becomes a forward and a backward, or an inference graph."""
    runs: Counter[str] = field(default_factory=Counter)
    """Number of graph runs by direction."""
    recompilations: list[Recompilations] = field(default_factory=list)
    """The reasons for new graphs, of each class of units."""
    on_step: Callable[[], bool] | None = None
    """The function to call after each step, at the next forward or after the engine's step, until it returns True."""
    steps: int = 0
    """Number of forwards that a backward has followed, while graphs run."""
    _has_backward: bool = False
    """Whether a backward has run since the last step was counted."""
    units_in_torch: dict[str, str] = field(default_factory=dict)
    """Class names of units that PyTorch runs whole, since ONNX Runtime saves too little time, and why."""
    are_stale: bool = False
    """Whether the units are to be compiled again: the next graph replaces all that are here."""

    def add(self, graph: Graph) -> None:
        """Add a compiled graph."""
        if self.are_stale:
            self.graphs.clear()
            self.units_in_torch.clear()
            self.are_stale = False
        self.graphs.append(graph)

    def note_run(self, direction: str) -> None:
        """Count a run of a graph."""
        self.runs[direction] += 1
        self._has_backward |= direction == "backward"
        if direction == "forward":
            self.end_step()

    def end_step(self) -> None:
        """Count a step and call :attr:`on_step`, if a backward has run since the last call."""
        if self._has_backward:
            self._has_backward = False
            self.steps += 1
            self.call_on_step()

    def call_on_step(self) -> None:
        """Call :attr:`on_step`, unless no step has been made or the function has returned True."""
        if self.steps and self.on_step is not None and self.on_step():
            self.on_step = None

    def leave_to_torch(self, unit: str, reason: str) -> None:
        """Note and say, once, that PyTorch runs all units of a class from now on."""
        if unit not in self.units_in_torch:
            self.units_in_torch[unit] = reason
            log.get_logger().info("PyTorch runs %s from now on: %s", unit, reason)

    def transitions(self) -> list[dict[str, str]]:
        """Return each graph that was made since no earlier one fitted, with the change that Dynamo names."""
        return [
            {
                "unit": graph.unit,
                "mode": "inference" if graph.direction == "inference" else "training",
                "reason": graph.recompile_reason,
            }
            for graph in self.graphs
            if graph.recompile_reason
        ]
