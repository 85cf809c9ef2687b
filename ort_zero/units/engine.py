"""What runs the units of a model: an engine compiles the graphs that Dynamo captures, and keeps a record of them."""

from __future__ import annotations

import abc
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from ort_zero import log
from ort_zero.runtimes.runner import Runner
from ort_zero.units.recompilations import Recompilations


class GraphCompiler(Protocol):
    """Compiles the graphs of one class of units; Dynamo calls it once for each graph that it captures."""

    recompilations: Recompilations
    """The reasons for the graphs, told by Dynamo's guards; ``note_graph()`` returns the reason for the newest graph."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Return a function that takes the inputs of a captured graph, and returns the graph's results.

        The call enters the graph in the engine. Before each forward the function calls :meth:`Engine.end_step`,
        and it counts each run in :attr:`Engine.runs`. An exception of a run gets the attribute
        :data:`ort_zero.units.unit_forward.IN_GRAPH`; PyTorch then runs the unit. A backward first calls what
        ``compiled_backward.running.before`` was in its forward: ZeRO-3 makes the weights whole.

        Raises:
            ExportError: the engine cannot run the graph; PyTorch then runs the unit.
        """

    def forward_of(self, unit: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of one unit: the compiled forward of the unit's class, or a form around it."""


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


class Engine(abc.ABC, Generic[Graph]):
    """Runs the units of one model. Units are named by the names of their classes."""

    name: str
    """The engine's name in ``ort_zero.status()``: ``compile`` or ``ortmodule``."""
    graph_node: str
    """What the names of the autograd nodes of the engine's graphs begin with, such as ``CompiledFunction``."""
    slowdown = 1.0
    """A unit stays compiled while it takes at most this multiple of its time in PyTorch, forward and backward."""
    first_runner = Runner.ONNXRUNTIME
    """What runs units before they are timed."""
    compiles_evaluations = False
    """Whether calls without gradients are compiled from the first one on, not only where long evaluations repay it."""
    starts_as_kept = False
    """Whether units run from the first call on in what an earlier start has found to be the fastest."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.dynamo_graphs = 0
        """Number of graphs that Dynamo has captured; each becomes a forward and a backward, or an inference graph."""
        self.runs: Counter[str] = Counter()
        """Number of graph runs by direction."""
        self.recompilations: list[Recompilations] = []
        """The reasons for new graphs, of each class of units."""
        self.units_in_torch: dict[str, str] = {}
        """Class names of units that PyTorch runs whole, since it is faster, and why."""
        self.units_in_inductor: set[str] = set()
        """Class names of units that Inductor runs, since it is faster."""
        self._said: set[tuple[str, str]] = set()
        """The classes, and the reasons, of which a line has said that another runner runs their units."""
        self.on_step: Callable[[], bool] | None = None
        """Called after each step, at the next forward or after the engine's step, until it returns True."""
        self.steps = 0
        """Number of forwards that a backward has followed, while graphs run."""
        self._counted_backwards = 0
        """Number of runs of backwards when the last step was counted."""
        self.is_stale = False
        """Whether the units are to be compiled again: the next graph replaces all that are here."""

    @abc.abstractmethod
    def compiler(self, unit_class: str, exclude: tuple[str, ...], runner: Runner | None = None) -> GraphCompiler:
        """Return a new compiler, whose `recompilations` the engine has too.

        Args:
            unit_class: of the units that it compiles.
            exclude: ``Unit.excluded``.
            runner: what the graphs are compiled for; None: :attr:`first_runner`.
        """

    @abc.abstractmethod
    def timed_keys(self, unit: nn.Module, unit_class: str) -> Sequence[str] | None:
        """Return names of the unit's graphs, equal on all ranks and in all processes; None: it is not timed now."""

    def runners_on(self, device: torch.device) -> Sequence[Runner]:
        """Return what may run the units on a device; they run in the first one until they are timed."""
        return Runner.ONNXRUNTIME, Runner.TORCH

    def lost(self, unit_class: str) -> Mapping[Runner, str]:
        """Return the runners that fail, or that cannot be the fastest, for a class of units, and why."""
        return {}

    @abc.abstractmethod
    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if PyTorch runs a unit from now on, without a trial of the whole unit."""

    def is_tried(self, unit: nn.Module, unit_class: str) -> bool:
        """Return True if a unit need not wait any more for what becomes of others of its class."""
        return True

    def has_failed(self, unit_class: str) -> bool:
        """Return True if a part of a class of units has failed or computed something else than PyTorch."""
        return False

    @abc.abstractmethod
    def status(self, units_are_settled: bool) -> dict[str, Any]:
        """Return the keys of the model's entry that are the engine's own: ``backend``, ``in_torch`` and others.

        `units_are_settled` is True once each timed unit stays compiled or is back in PyTorch.
        """

    @abc.abstractmethod
    def is_settled(self, units_are_settled: bool) -> bool:
        """Return True once it is decided where everything runs; `units_are_settled` as for :meth:`status`."""

    def after_first_step(self, module: str) -> bool:
        """Note that the first step of a model of class `module` is over; return True to compile the units again."""
        return False

    def memory_plans(self, budgets: Sequence[str]) -> list[dict[str, Any]]:
        """Return what each budget would have units compute again; an engine without such plans returns none."""
        return []

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return rows of the summary: what forwards keep for backwards."""
        return ()

    def recompilations_of(self, unit_class: str) -> Recompilations:
        """Return a new list of reasons for the graphs of a class of units, which the engine reports."""
        self.recompilations.append(Recompilations(unit_class or "the compiled function"))
        return self.recompilations[-1]

    def add(self, graph: Graph) -> None:
        """Add a compiled graph."""
        if self.is_stale:
            self.graphs.clear()
            self.units_in_torch.clear()
            self.units_in_inductor.clear()
            self.is_stale = False
        self.graphs.append(graph)

    def graphs_of(self, unit_class: str) -> list[Graph]:
        """Return the graphs of a class of units."""
        return [graph for graph in self.graphs if graph.unit == unit_class]

    def end_step(self) -> None:
        """Count a step and call :attr:`on_step`, if a backward has run since the last call."""
        if self.runs["backward"] > self._counted_backwards:
            self._counted_backwards = self.runs["backward"]
            self.steps += 1
            self.call_on_step()

    def call_on_step(self, in_torch: bool = False) -> None:
        """Call :attr:`on_step`, unless the function has returned True, or no step has been made.

        Args:
            in_torch: PyTorch runs all units, so no graph's run counts a step.
        """
        if (self.steps or in_torch) and self.on_step is not None and self.on_step():
            self.on_step = None

    def leave_to(self, runner: Runner, unit_class: str, reason: str) -> None:
        """Note and say, once, that another runner than the first one runs all units of a class from now on."""
        if runner is Runner.TORCH:
            self.units_in_torch.setdefault(unit_class, reason)
        elif runner is Runner.INDUCTOR:
            self.units_in_inductor.add(unit_class)
        self.say_runs(runner, unit_class, unit_class, reason)

    def say_runs(self, runner: Runner, unit_class: str, what: str, reason: str) -> None:
        """Say what runs units of a class from now on, once for each reason."""
        self._say(logging.INFO, unit_class, reason, f"{runner.title} runs {what} from now on")

    def say_left_out(self, runner: Runner, unit_class: str, reason: str) -> None:
        """Say that a runner does not run the units of a class, once for each reason."""
        self._say(logging.WARNING, unit_class, reason, f"{runner.title} is left out for {unit_class}")

    def _say(self, level: int, unit_class: str, reason: str, what: str) -> None:
        if (unit_class, reason) not in self._said:
            self._said.add((unit_class, reason))
            log.get_logger().log(level, "%s: %s", what, reason)

    def figures(self) -> dict[str, Any]:
        """Return the entries that every engine has in ``status()``: graphs, recompilations, units in PyTorch, ..."""
        return {
            "graphs": len(self.graphs),
            "dynamo_graphs": self.dynamo_graphs,
            "units_in_torch": dict(self.units_in_torch),
            "units_at_limit": [each.unit for each in self.recompilations if each.at_limit],
            "recompilations": [each["reason"] for each in self.transitions()],
        }

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
