"""Carries out one forward call of a module in ONNX Runtime, from its arguments to its result or its error.

Called by :class:`ort_zero.ortmodule.runtime.runtime.Runtime`. The ranks agree on each step of a call by the table in
:mod:`ort_zero.ortmodule.runtime.rank_protocol`; what is done about the graph is decided in
:mod:`ort_zero.ortmodule.runtime.guards.decide`.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat.shared_memory import shares_memory
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime import calls_in_torch
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.call_effects import carry_out
from ort_zero.ortmodule.runtime.error_messages import explain
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.export.advanced_iterators import unmoved
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export.part_states import PartStates
from ort_zero.ortmodule.runtime.export.plain_lookups import plain_lookups
from ort_zero.ortmodule.runtime.export.pytorch_calls import CALLS
from ort_zero.ortmodule.runtime.export.random_states import GlobalStates, preserved
from ort_zero.ortmodule.runtime.export.restored_buffers import BufferStates
from ort_zero.ortmodule.runtime.export_retries import ExportRetries
from ort_zero.ortmodule.runtime.fused_loss.lazy_logits import put_logits
from ort_zero.ortmodule.runtime.gradients_of_gradients import gradients_in_torch
from ort_zero.ortmodule.runtime.guards import value_guards
from ort_zero.ortmodule.runtime.guards.keys import Action, Observed, Transition
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.rank_agreement import RankAgreement
from ort_zero.ortmodule.runtime.rank_protocol import Action as RankAction
from ort_zero.ortmodule.runtime.rank_protocol import (
    BuildAgain,
    BuildAnew,
    BuildOwn,
    Decided,
    Enter,
    Entered,
    Problem,
    Ran,
    Return,
    Run,
    Scope,
)
from ort_zero.ortmodule.runtime.repeated_forward import RepeatedForward
from ort_zero.ortmodule.runtime.transitions import GraphTransitionManager
from ort_zero.statistics.collect.subscribed_model import SubscribedModel

MOST_ATTEMPTS = 500
"""Maximum number of exports for one graph: each one that fails teaches what has to stay in PyTorch in the next."""


class ModuleRuntime(Protocol):
    """The interface that a forward call needs of :class:`ort_zero.ortmodule.runtime.runtime.Runtime`."""

    module: torch.nn.Module
    config: OrtModuleConfig
    stage: int
    ranks: RankAgreement
    excluded: ExcludedModules
    guard_failures: value_guards.GuardFailures
    slow_attributes: set[str]
    graph_subscribers: list[SubscribedModel]
    modes: dict[bool, GraphTransitionManager]

    @property
    def trainable(self) -> bytes:
        """``requires_grad`` of each parameter, one byte each."""

    def graphs(self) -> Iterable[BuiltGraph]:
        """Yield the graphs of all modes."""

    def take_apart(
        self, manager: ort_compat.Manager, args: tuple, kwargs: dict, numbers: Collection[str]
    ) -> pytree.Call:
        """Return the tensors of a call, those of the arguments `numbers` among them, and the structure of the rest."""

    def observe_runs(self, graph: BuiltGraph) -> None:
        """Surround the runs of a new graph."""

    def graph_is_ready(self, graph: BuiltGraph) -> None:
        """Note that a graph is about to run."""

    def end_call(self, graph: BuiltGraph, result: Any, args: tuple, kwargs: dict) -> None:
        """Note that a call has its result."""

    def note_second_order(self) -> None:
        """Note that PyTorch computes gradients that are to be differentiated themselves."""

    def takes_over(self, error: BaseException, building: bool) -> bool:
        """Return whether PyTorch may run the module, or its own code, after an error."""


class ForwardCall:
    """Carries out one call.

    Args:
        runtime: runtime of the module.
        manager: ORT's, of the mode.
        transitions: holds the graphs of the mode.
        in_torch: runs the module in PyTorch in the place of its graph, for the reason that it is given.
        why_in_torch: why PyTorch is to run this call; None if the graph is.
    """

    def __init__(
        self,
        runtime: ModuleRuntime,
        manager: ort_compat.Manager,
        transitions: GraphTransitionManager,
        in_torch: Callable[[str], Any],
        why_in_torch: str | None = None,
    ):
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._manager = manager
        self._transitions = transitions
        self._in_torch = in_torch
        self._retries = ExportRetries(runtime, transitions)
        self._why_in_torch = why_in_torch
        self._transition = Transition(Action.EXPORT)
        self._given: tuple[tuple, dict] = (), {}
        self._new: BuiltGraph | None = None
        """The graph that this call has built."""
        self._excludes = 0
        """Number of the submodule that this rank wants to stay in PyTorch; 0 for none."""
        self._why_excluded = ""
        self._random_states: GlobalStates | None = None
        """States before the run of a graph that may not hold; None where nothing in PyTorch draws from them."""
        self._part_states: PartStates | None = None
        """What the code of PyTorch's parts left behind before the run of a graph that may not hold; None for others."""
        self._buffer_states: BufferStates | None = None
        """Buffers before the run of a graph that may not hold; None for other graphs."""

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Return the result of the module. All ranks, as far as the scope of the call makes them agree."""
        transitions = self._transitions
        # before the vote: a rank that fails after it leaves the others alone with their collectives
        self._given = args, kwargs
        self._take_apart()
        observed = self._observe()
        if transitions.module_guard.is_replaced:
            return self._in_torch(calls_in_torch.REPLACED)
        self._transition = transitions.check(observed)
        if self._transition.action is Action.EXPORT:
            self._retries.exclude_readers(transitions.note_changes(observed))
            self._note_sizes(observed)
            if transitions.note_numbers(observed):
                self._take_apart()
                observed = self._observe()
        action = self._ranks.advance(self._decided())
        while not isinstance(action, Return):
            if isinstance(action, Enter):
                if action.excludes:
                    self._exclude_together(action.excludes)
                    observed = self._observe()
                graph = self._enter(observed)
                action = self._ranks.advance(_entered(graph))
            elif isinstance(action, BuildAgain):
                self._undo_run()
                if action.failed_guard is not None:
                    guards = graph.effects.guards
                    if action.failed_guard < len(guards):
                        self._guard_failed(guards[action.failed_guard][1])
                    else:
                        self._force("a value that another rank's graph was made for has changed")
                graph = self._enter(self._observe())
                action = self._ranks.advance(_entered(graph))
            elif isinstance(action, BuildOwn):
                if graph.exported.shares:
                    self._force("another rank's graph has its collectives in another order")
                    graph = self._enter(self._observe())
                action = self._ranks.advance(_entered(graph))
            else:
                assert isinstance(action, Run)
                if graph.effects.changed and self._shares_changed_memory(graph):
                    self._why_in_torch = calls_in_torch.SHARED
                if self._why_in_torch is not None:
                    result = self._in_torch(self._why_in_torch)
                    self._ranks.advance(Ran(None))
                    return result
                tensors, action = self._run_graph(graph)
        if self._part_states is not None:
            self._part_states.end()
        result = carry_out(
            graph, tensors, self._arguments, self._given, self._runtime.module, transitions.attribute_guard
        )
        self._runtime.end_call(graph, result, args, kwargs)
        return result

    def failed(self, error: BaseException) -> tuple[BaseException, bool]:
        """Tell the ranks that wait for this one, and leave a clean state.

        Returns:
            The error to raise, and whether PyTorch takes over instead.
        """
        transitions, state = self._transitions, self._ranks.state
        for graph in self._runtime.graphs():
            if graph.executor is not None:
                with contextlib.suppress(Exception):
                    graph.executor.drain()
        builder = transitions.builder
        if state.builds:
            transitions.forget(self._new)
        clear = error
        if state.concerns_building and not self._retries.is_users_own(error):
            clear = explain(error, self._runtime.module, builder.fallback_policy.failed_place)
        falls_back = self._runtime.takes_over(clear, state.builds)
        warns = self._runtime.config.fallback == "warn"
        if state.builds and isinstance(clear, ExportError) and transitions.graphs and (warns or not falls_back):
            reasons = "; ".join(self._transition.reasons)
            clear = type(clear)(f"{clear} [a new graph was needed: {reasons}; earlier ones are kept]")
        stop = self._ranks.fail(str(clear), falls_back)
        # ranks that differ in what they run would not get on with PyTorch either, unless the configuration says so
        falls_back = stop.fall_back and (warns or stop.problem in (Problem.OWN_ERROR, Problem.OTHERS_ERROR))
        if warns or not falls_back:
            builder.output.replay()
        return clear, falls_back

    # -- before the run ---------------------------------------------------------------------------------------------

    def _take_apart(self) -> None:
        args, kwargs = self._given
        self._arguments = self._runtime.take_apart(self._manager, args, kwargs, self._transitions.numbers.inputs)

    def _observe(self) -> Observed:
        return self._transitions.observe(self._arguments, self._runtime.graph_subscribers)

    def _note_sizes(self, observed: Observed) -> None:
        """Count what makes this call export for its sizes; a submodule that does so too often is to stay in PyTorch."""
        read = self._transitions.note_sizes(observed)
        if read is None:
            return
        if read.path and read.path not in self._runtime.excluded.reasons:
            # other ranks may have other sizes, so that they learn of it with the vote
            self._excludes = [path for path, _ in self._runtime.module.named_modules()].index(read.path)
            self._why_excluded = f"{read.what()}, which changes often"
        else:
            self._retries.warn_of_exports(f"the forward of {type(self._runtime.module).__name__} {read.what()}")

    def _exclude_together(self, numbers: Sequence[int]) -> None:
        """Let submodules stay in PyTorch, on all ranks that agree on this call, and have a graph built without them.

        Args:
            numbers: of the submodules, in the order of the model's ``modules()``.
        """
        modules = list(self._runtime.module.modules())
        for number in numbers:
            module = modules[number]
            why = self._why_excluded if number == self._excludes else "takes sizes for Python values on another rank"
            if self._runtime.excluded.add(module, why):
                get_logger().info("%s stays in PyTorch: it %s", self._runtime.excluded.path_of(module), why)
        if self._ranks.state.scope is not Scope.ALONE:
            for mode in self._runtime.modes.values():
                mode.forget_all()
        if self._transition.action is not Action.EXPORT:
            self._force("a submodule stays in PyTorch for another rank's sizes")

    def _decided(self) -> Decided:
        """Return what this rank is about to do, for the vote."""
        transition = self._transition
        ready = next((g for g in self._transitions.graphs if g.known.number == transition.graph), None)
        return Decided(
            builds=transition.action.builds,
            trainable=zlib.crc32(self._runtime.trainable),
            graph=zlib.crc32(ready.digest.encode()) if ready is not None else 0,
            excludes=self._excludes,
        )

    def _force(self, reason: str) -> None:
        """Export again although the graph fits, or although nothing has changed since an attempt that failed."""
        self._transition = Transition(Action.EXPORT, (reason,), forced=True)

    def _enter(self, observed: Observed) -> BuiltGraph:
        """Carry out the transition; what a failure teaches is tried again, while other ranks wait for this one.

        Raises:
            RuntimeError: after :data:`MOST_ATTEMPTS` of them there is no graph.
        """
        if not self._transition.action.builds:
            return self._build(observed)
        # what looks at the module meanwhile (its repr, a copy of it) is to gather no weight, which would stay whole
        with plain_lookups(self._runtime.module):
            return self._build(observed)

    def _build(self, observed: Observed) -> BuiltGraph:
        for _ in range(MOST_ATTEMPTS):
            transition, self._new = self._transition, None
            try:
                # an export runs the module, and its result must not depend on whether there was one
                with self._unmoved() if transition.action.builds else contextlib.nullcontext():
                    graph = self._transitions.enter(
                        transition, observed, self._arguments, self._runtime.graph_subscribers
                    )
            except BaseException as error:
                reason = self._retries.after_failure(error)
                if reason is None:
                    raise
                self._force(reason)
                self._take_apart()
                observed = self._observe()
                continue
            if transition.action.builds:
                self._new = graph
                self._runtime.observe_runs(graph)
            return graph
        raise RuntimeError(
            f"no graph after {MOST_ATTEMPTS} attempts; what the last one has taught is: {self._transition.reasons[0]}"
        )

    @contextlib.contextmanager
    def _unmoved(self) -> Iterator[None]:
        """Leave generators of random numbers and iterators where they stand, though the block runs the module."""
        module, excluded = self._runtime.module, self._runtime.excluded
        in_torch = functools.partial(_is_in_torch, excluded)
        with preserved(module), unmoved(module, in_torch, excluded.iterators):
            yield

    # -- the run ----------------------------------------------------------------------------------------------------

    def _run_graph(self, graph: BuiltGraph) -> tuple[Sequence[torch.Tensor], RankAction]:
        """Return the outputs of the graph, and what to do next."""
        self._runtime.graph_is_ready(graph)
        arguments = self._arguments
        may_draw = self._runtime.excluded.draw_random_numbers or any(read.random for _, read in graph.effects.guards)
        self._random_states = GlobalStates() if may_draw else None
        may_repeat = graph.effects.guards or self._runtime.excluded.reasons
        self._buffer_states = BufferStates(self._runtime.excluded) if may_repeat else None
        repeats_parts = graph.effects.guards and self._runtime.excluded.reasons
        self._part_states = PartStates(self._runtime.module, self._runtime.excluded) if repeats_parts else None
        try:
            given = list(arguments.tensors)
            if self._manager.training:
                for i in graph.effects.changed:
                    given[i] = given[i].clone()  # the caller's memory changes, and a backward may need what it holds
            inputs = graph.info.construct_inputs(dict(zip(arguments.names, given, strict=True)))
            for call, _ in graph.effects.left:
                CALLS.numbered(call).take_left()  # of an export, or of a run that has failed
            in_torch = functools.partial(
                gradients_in_torch, self._runtime.module, graph, arguments, inputs, note=self._runtime.note_second_order
            )
            # below a ZeRO optimizer, which takes none for zeros, and counts the gradients that come
            again = RepeatedForward(
                graph,
                inputs,
                self._runtime.excluded,
                self._random_states,
                in_torch,
                self._transitions.draw_in_torch,
                leaves_out=self._runtime.stage == 0,
            )
            number, graph.runs_begun = graph.runs_begun, None  # for a run that fails
            tensors = self._manager.run(graph.session, inputs, again)
            graph.runs_begun = number + 1 if number is not None else None
            if graph.session.gradients:
                again.note_run()
            torch_fallback.keep_saved_with(tensors)
            if graph.returned_logits is not None:
                tensors = put_logits(tensors, graph.returned_logits, self._transitions.logit_reads.note)
            first_guard = graph.effects.first_guard
            guards = graph.effects.guards
            # behind the values of the guards there may be a token
            failed = value_guards.first_failed(guards, tensors[first_guard : first_guard + len(guards)])
        except BaseException as error:
            self._refuse_alone(error)
            reason = self._retries.after_failure(error) or self._retries.after_run(error)
            if reason is None:
                raise
            self._force(reason)
            self._take_apart()
            return [], self._ranks.advance(BuildAnew())
        return tensors, self._ranks.advance(Ran(failed))

    def _shares_changed_memory(self, graph: BuiltGraph) -> bool:
        """Return whether an argument that the graph changes shares memory with another one, or with a weight.

        Raises:
            ExportError: it does, and the other ranks wait in the collectives of the graph.
        """
        tensors = self._arguments.tensors
        held = graph.info.held_tensors(dict(zip(self._arguments.names, tensors, strict=True)))
        training = self._manager.training
        shared = next((i for i in graph.effects.changed if shares_memory(i, tensors, held, in_autograd=training)), None)
        if shared is not None and graph.executor is not None:
            raise ExportError(
                f"argument {self._arguments.names[shared]}, which the forward changes in place, shares memory with "
                "another argument or a weight, which no graph can follow: give the forward a copy (.clone())"
            )
        return shared is not None

    def _undo_run(self) -> None:
        """Take back what PyTorch's parts have done in a run that did not hold: the call runs another graph."""
        if self._random_states is not None:
            self._random_states.restore()
        if self._buffer_states is not None:
            self._buffer_states.restore()
        if self._part_states is not None:
            self._part_states.restore()
            self._part_states = None

    def _refuse_alone(self, error: BaseException) -> None:
        """Raise for a module that must run in PyTorch as of now where other ranks cannot know of it.

        Raises:
            ExportError: the error is such a one, and the collectives of the graph are under way on the other ranks.
        """
        if isinstance(error, ValueReadError) and self._ranks.state.scope is Scope.EVERY_CALL:
            path = self._runtime.excluded.path_of(error.module)
            raise ExportError(
                f"{path} {error}; under ZeRO-3 the other ranks cannot follow in the middle of a step: keep it in "
                f'PyTorch from the start with "ort_zero": {{"ortmodule": {{"exclude": ["{path}"]}}}}'
            ) from None

    def _guard_failed(self, read: ValueReadError) -> None:
        """Have the graph exported for the value that Python code takes now; a module whose value changes often goes
        to PyTorch.

        Raises:
            ExportError: that module is the model itself.
        """
        excluded = self._runtime.excluded
        self._force(f"{excluded.path_of(read.module)} {read}, and the value has changed")
        if (read.of_attribute or read.of_sizes) and excluded.own_path(read.module) == "":
            return  # there is nothing smaller, and PyTorch trains it
        if self._runtime.guard_failures.changes_often(read):
            excluded.exclude(read)


def _entered(graph: BuiltGraph) -> Entered:
    return Entered(graph.digest, bool(graph.effects.guards), graph.exported.shares)


def _is_in_torch(excluded: ExcludedModules, module: torch.nn.Module) -> bool:
    return excluded.own_path(module) in excluded.reasons
