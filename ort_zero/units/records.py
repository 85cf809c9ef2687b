"""Record the graphs of a model's units: directions, runs, and the reasons why they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    on_first_step: Callable[[], None] | None = None
    """The function to call once the first step is over: at the next forward, or after the engine's step."""
    units_in_torch: set[str] = field(default_factory=set)
    """Class names of units that PyTorch runs whole, since ONNX Runtime saves too little time."""
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
        if direction == "forward":
            self.end_first_step()

    def end_first_step(self) -> None:
        """Call :attr:`on_first_step`, once, if a backward has run."""
        if self.on_first_step is not None and self.runs["backward"]:
            call, self.on_first_step = self.on_first_step, None
            call()

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
