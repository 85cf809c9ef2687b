"""Holds the graphs of one mode of a model, and brings in the one that a call needs.

::

    check for re-export ──► export ──► check for re-processing ──► post-export processing ──► execute
            │                                 ▲        │                                         ▲
            └─────────────────────────────────┘        └─────────────────────────────────────────┘

:func:`.runtime.guards.decide.decide` decides; :class:`GraphTransitionManager` carries out. A graph that is
put aside keeps its session, so that going back to it costs nothing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero import env
from ort_zero.log import get_logger
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.fused_loss.lazy_logits import LogitReads
from ort_zero.ortmodule.runtime.graph_builder import GraphBuilder
from ort_zero.ortmodule.runtime.graph_processing import SHARED, STEPS
from ort_zero.ortmodule.runtime.guards.argument_numbers import ArgumentNumbers
from ort_zero.ortmodule.runtime.guards.attribute_changes import AttributeChanges
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard, AttributeValues
from ort_zero.ortmodule.runtime.guards.decide import decide
from ort_zero.ortmodule.runtime.guards.keys import (
    Action,
    ExportKey,
    Graphs,
    Observed,
    ProcessKey,
    TensorInput,
    Transition,
)
from ort_zero.ortmodule.runtime.guards.module_guard import ModuleGuard
from ort_zero.ortmodule.runtime.guards.size_guard import GuardedRead, SizeChanges
from ort_zero.statistics.collect.subscribed_model import SubscribedModel
from ort_zero.utils.progress import steps_bar

_BUILDING = threading.RLock()
"""Held while a graph is built: an export replaces functions of torch for the whole process."""
MOST_READS = 3
"""Number of calls in a row whose logits may be read before they become results of the graph."""
MOST_TRANSITIONS = 1000
"""Maximum number of transitions of a model that are remembered; the oldest ones are forgotten."""


@dataclass(frozen=True, slots=True)
class CompletedTransition:
    """A transition that was carried out."""

    call: int
    """Number of the call in its mode, from 1."""
    mode: str
    graph: int
    transition: Transition
    seconds: float
    """Seconds from the decision until the graph was ready."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the work."""
    cache: str | None = None
    """Result of the lookup in the export cache, with the reason of a miss; None without a cache."""
    shared: str | None = None
    """Whether the export of another graph served, and which or why not; None where there was none to compare."""

    def as_dict(self) -> dict[str, Any]:
        """Return the transition as plain values, for ``ort_zero.status()``."""
        return {
            "call": self.call,
            "mode": self.mode,
            "graph": self.graph,
            "transition": self.transition.action.value,
            "reasons": list(self.transition.reasons),
            "seconds": round(self.seconds, 3),
            "steps": {step: round(seconds, 3) for step, seconds in self.steps.items()},
            "cache": self.cache,
            "shared_export": self.shared,
        }


class TransitionHistory:
    """Remembers the transitions of one model, and numbers its graphs."""

    def __init__(self) -> None:
        self.completed: deque[CompletedTransition] = deque(maxlen=MOST_TRANSITIONS)
        self.graphs = 0
        """Number of the newest graph; graphs count from 1."""


class GraphTransitionManager:
    """Holds the graphs of one mode, last used first, and carries out what the guards decide.

    Args:
        builder: builds graphs.
        module_guard: guard on the tree of the user's module, shared by the modes.
        attribute_guard: guard on what its code reads besides, shared by the modes.
        history: shared by the modes.
        capacity: graphs that may be held at a time.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        module_guard: ModuleGuard,
        attribute_guard: AttributeGuard,
        history: TransitionHistory,
        capacity: int,
    ):
        self.builder = builder
        self.module_guard = module_guard
        self.attribute_guard = attribute_guard
        self.changes = AttributeChanges(type(builder.module).__name__)
        self.numbers = ArgumentNumbers(pytree.parameters_of(builder.module.forward))
        self.sizes = SizeChanges(capacity)
        self.history = history
        self.capacity = capacity
        self.graphs: list[BuiltGraph] = []
        self.memory_plan = str(builder.memory.request) if builder.memory is not None else ""
        self.logit_reads = LogitReads()
        """Counts who reads logits that a graph does not hold."""
        self._fuses_loss = builder.fuses_loss
        self.calls = 0
        self.exports = 0
        self.retired: Counter[str] = Counter()
        """Counters of the graphs that are gone, see :func:`counted`."""
        self._logged_switches: set[tuple[int, int]] = set()
        """Pairs of graph numbers (from, to) whose switch was logged before."""

    @property
    def mode(self) -> str:
        """Name of the mode: ``"training"`` or ``"inference"``."""
        return self.builder.manager.mode

    @property
    def current(self) -> BuiltGraph | None:
        """The graph of the last call; None before the first call."""
        return self.graphs[0] if self.graphs else None

    # -- check -----------------------------------------------------------------------------------------------------

    def observe(self, call: pytree.Call, subscribers: Sequence[SubscribedModel]) -> Observed:
        """Return what of a call, and of the module at this moment, decides about graphs."""
        version = self.module_guard.check()
        tensors = tuple(
            [_tensor_input(name, t.dtype, t.dim()) for name, t in zip(call.names, call.tensors, strict=True)]
        )
        training = self.builder.manager.training
        device = self.builder.manager.device
        wanted = tuple([n for n, t in zip(call.names, call.tensors, strict=True) if t.requires_grad])
        return Observed(
            ExportKey(
                call.structure,
                tensors,
                version,
                tuple(subscribers),
                self.attribute_guard.check(version.number),
                torch_state(device.type),
                tuple([t.shape for t in call.tensors]),
                (self.module_guard.frozen, wanted),
            ),
            ProcessKey(
                frozen=self.module_guard.frozen if training else (),
                inputs=wanted + self.module_guard.buffers_with_gradient() if training else (),
                memory_plan=self.memory_plan,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                device=str(device),
                fused_loss=self._fuses_loss and device.type == "cpu",
            ),
        )

    def begin_call(self) -> None:
        """Count a call; logits that are read call by call are computed in the graph from now on."""
        self.calls += 1
        self.logit_reads.begin_call()
        graph = self.current
        if self.logit_reads.in_a_row < MOST_READS or graph is None:
            return
        # ranks that share the collectives of their graphs must go on with the same graph, and a budget may need it
        if graph.executor is None and (graph.memory is None or graph.memory.budget is None):
            self._fuses_loss = False

    def check(self, observed: Observed) -> Transition:
        """Return what has to be done before `observed` can run."""
        return decide(Graphs(tuple([graph.known for graph in self.graphs])), observed)

    def note_changes(self, observed: Observed) -> dict[str, str]:
        """Count the attributes that make an export necessary.

        Returns:
            Why submodules are to stay in PyTorch, by their paths; "" stands for the model itself.
        """
        now, current = observed.export.attributes, self.current
        if current is None or not isinstance(now, AttributeValues):
            return {}
        old = current.known.export.read
        places = self.changes.note(old, now)
        return {path: self.changes.why(place) for place in places for path in old.readers.get(place, ("",))}

    def note_numbers(self, observed: Observed) -> bool:
        """Count the numbers among the arguments that make an export necessary; return True if some become inputs."""
        current = self.current
        if current is None:
            return False
        added = self.numbers.note(current.known.export.structure, observed.export.structure)
        if added:
            get_logger().info(
                "argument %s of %s changes often, and is an input of the graph from now on",
                ", ".join(added), type(self.builder.module).__name__,
            )  # fmt: skip
        return bool(added)

    def note_sizes(self, observed: Observed) -> GuardedRead | None:
        """Count what Python code takes from sizes where that makes an export necessary.

        Returns:
            What has done so too often; None if nothing has.
        """
        keys = [graph.known.export for graph in self.graphs]
        alike = [key for key in keys if key.matches_but_for_sizes(observed.export)]
        return self.sizes.note([key.size_guard for key in alike], observed.export.shapes)

    def draw_in_torch(self) -> None:
        """Let PyTorch draw the masks of dropout from the next call on: it can draw them again for another backward."""
        why = "several backwards go through one call, and each of them needs the same masks"
        if self.builder.fallback_policy.avoid_all("Dropout", why):
            self.forget_all()
            get_logger().info("%s: PyTorch draws the masks of dropout: %s", type(self.builder.module).__name__, why)

    def forget_all(self) -> None:
        """Drop all graphs: those that wait for their backward stay until then."""
        for graph in list(self.graphs):
            self.forget(graph)

    # -- carry out -------------------------------------------------------------------------------------------------

    def enter(
        self, transition: Transition, observed: Observed, call: pytree.Call, subscribers: Sequence[SubscribedModel]
    ) -> BuiltGraph:
        """Carry out a transition and return the graph to run. An error leaves all graphs as they were."""
        if transition.action is Action.REUSE:
            return self.graphs[0]
        started = time.perf_counter()
        steps: dict[str, float] = {}
        if transition.action is Action.SWITCH:
            graph = self._numbered(transition.graph)
        else:
            self.builder.seconds = steps = {}
            self.builder.lookup = None
            number = self.history.graphs + 1
            name = f"{type(self.builder.module).__name__} {self.mode} graph {number}"
            with _BUILDING, steps_bar(name, len(STEPS), shown=env.rank() == 0) as self.builder.processor.shown:
                if transition.action is Action.EXPORT:
                    self.builder.attribute_inputs = self.changes.inputs
                    graph = self.builder.build(observed, call, subscribers, number, anew=transition.forced)
                else:
                    exported = self._numbered(transition.graph).exported
                    graph = self.builder.processor.process(exported, observed.process, number, call)
            self.builder.output.drop()
            self.changes.graph_built()
            self.history.graphs = number
            self.exports += "export" in steps
        before = self.current
        self._put_first(graph)
        exports = transition.action is Action.EXPORT
        lookup = self.builder.lookup if exports else None
        done = CompletedTransition(
            self.calls,
            self.mode,
            graph.known.number,
            transition,
            time.perf_counter() - started,
            dict(steps),
            lookup.outcome if lookup is not None else None,
            (self.builder.shared.outcome or None) if exports else None,
        )
        self.history.completed.append(done)
        self._log(done, graph, before)
        return graph

    def forget(self, graph: BuiltGraph | None) -> None:
        """Drop a graph that did not run, if it is held."""
        if graph in self.graphs:
            self.graphs.remove(graph)
            self._retire(graph)

    def _numbered(self, number: int | None) -> BuiltGraph:
        return next(graph for graph in self.graphs if graph.known.number == number)

    def _put_first(self, graph: BuiltGraph) -> None:
        def may_match_again(other: BuiltGraph) -> bool:
            # what was built for another tree, or for subscribers that are gone, will not match again
            same_tree = other.known.export.model.number == graph.known.export.model.number
            models = (readers.model() for readers in other.exported.readers)
            read = all(model is not None and model.subscribers for model in models)
            # one call has one graph: a forced export replaces the one that did not hold
            return same_tree and read and not _serve_alike(other, graph)

        before = self.graphs
        self.graphs = [graph, *(other for other in before if other is not graph and may_match_again(other))][
            : self.capacity
        ]
        for other in before:
            if other not in self.graphs:
                self._retire(other)

    def _retire(self, graph: BuiltGraph) -> None:
        self.retired.update(counted(graph))

    def _log(self, done: CompletedTransition, graph: BuiltGraph, before: BuiltGraph | None) -> None:
        """Write a line about a transition.

        Args:
            done: the transition.
            graph: the one that runs now.
            before: the one that ran before, None for the first call.
        """
        log = get_logger()
        name = f"{type(self.builder.module).__name__} {self.mode} graph {graph.known.number}"
        why = "; ".join(done.transition.reasons) or "no reason"
        if done.transition.action is Action.SWITCH:
            pair = (before.known.number if before else 0, graph.known.number)
            # who alternates at every step reads of each pair once
            level = log.debug if pair in self._logged_switches else log.info
            self._logged_switches.add(pair)
            level("%s: used again (%s)", name, why)
            return
        verb = "re-processed"
        if done.transition.action is Action.EXPORT:
            verb = "exported" if "export" in done.steps else "shares an export" if SHARED in done.steps else "loaded"
        collectives = f", {graph.collectives}" if graph.collectives else ""
        cache = f"; export cache {done.cache}" if done.cache else ""
        shared = f"; shared export {done.shared}" if SHARED in done.steps else ""
        parts = ", ".join(f"{step} {seconds:.1f}" for step, seconds in done.steps.items() if seconds >= 0.05)
        parts = f"; seconds: {parts}" if parts else ""
        log.info("%s: %s in %.1f s (%s); %d nodes, %d PythonOps%s", name, verb, done.seconds, why,
                 graph.nodes, graph.python_ops, f"{collectives}{parts}{cache}{shared}")  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _tensor_input(name: str, dtype: torch.dtype, rank: int) -> TensorInput:
    """Return the key of one tensor; making a frozen record takes longer than finding it."""
    return TensorInput(name, str(dtype), rank)


def torch_state(device: str) -> tuple[tuple[str, str], ...]:
    """Return the global settings of torch that a trace depends on, by name.

    Args:
        device: type of the model's device.
    """
    return _torch_state(
        torch.get_default_dtype(), torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    )


@functools.lru_cache(maxsize=64)
def _torch_state(default: torch.dtype, autocast: torch.dtype | None) -> tuple[tuple[str, str], ...]:
    return ("default dtype", str(default)), ("autocast", str(autocast) if autocast is not None else "off")


def counted(graph: BuiltGraph) -> dict[str, int]:
    """Return how many gathers and reduces a graph has done, and the elements that it gathered."""
    if graph.executor is None:
        return {"gathers": 0, "gathered_elements": 0, "reduces": 0}
    counters = graph.executor.counters
    return {
        "gathers": counters.gathers,
        "gathered_elements": counters.gathered_elements,
        "reduces": counters.reduces,
    }


def _serve_alike(one: BuiltGraph, other: BuiltGraph) -> bool:
    return one.known.export.matches(other.known.export) and one.known.process == other.known.process
