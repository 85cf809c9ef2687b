"""Carries out one forward call of a module in ONNX Runtime, from its arguments to its result or its error.

Called by :class:`ort_zero.runtime.runtime.Runtime`. The ranks agree on each step of a call by the table in
:mod:`ort_zero.runtime.rank_protocol`; what is done about the graph is decided in
:mod:`ort_zero.runtime.guards.decide`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ort_zero.compat import ortmodule as ort_compat
from ort_zero.compat.torch_onnx import Unexportable
from ort_zero.compat.value_reads import ValueReadError
from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError, RankError
from ort_zero.log import get_logger
from ort_zero.runtime.built_graph import BuiltGraph
from ort_zero.runtime.call_effects import carry_out
from ort_zero.runtime.error_messages import cause_of, explain
from ort_zero.runtime.export import pytree
from ort_zero.runtime.export.attribute_inputs import AttributeInputError, can_be_input
from ort_zero.runtime.export.attribute_paths import ATTRIBUTE, MODULE, Place, PlaceFinder, is_number
from ort_zero.runtime.export.attribute_records import AttributeChangedError, StartValuesError
from ort_zero.runtime.export.buffer_states import BufferStates
from ort_zero.runtime.export.excluded_modules import ExcludedModules
from ort_zero.runtime.export.pytorch_calls import CALLS
from ort_zero.runtime.export.random_states import GlobalStates, preserved
from ort_zero.runtime.export.tracer import ArgumentInputError
from ort_zero.runtime.fused_loss.lazy_logits import put_logits
from ort_zero.runtime.guards import value_guards
from ort_zero.runtime.guards.keys import Action, Observed, Transition
from ort_zero.runtime.operators import torch_fallback
from ort_zero.runtime.rank_agreement import RankAgreement
from ort_zero.runtime.rank_protocol import Action as RankAction
from ort_zero.runtime.rank_protocol import BuildAgain, BuildAnew, Decided, Enter, Entered, Ran, Return, Run, Scope
from ort_zero.runtime.transitions import GraphTransitionManager
from ort_zero.statistics.collect.subscribed_model import SubscribedModel


class ModuleRuntime(Protocol):
    """The interface that a forward call needs of :class:`ort_zero.runtime.runtime.Runtime`."""

    module: torch.nn.Module
    config: OrtModuleConfig
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


class ForwardCall:
    """Carries out one call.

    Args:
        runtime: runtime of the module.
        manager: ORT's, of the mode.
        transitions: holds the graphs of the mode.
        in_torch: runs the module in PyTorch in the place of its graph; None for a call that the graph runs.
    """

    def __init__(
        self,
        runtime: ModuleRuntime,
        manager: ort_compat.Manager,
        transitions: GraphTransitionManager,
        in_torch: Callable[[], Any] | None = None,
    ):
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._manager = manager
        self._transitions = transitions
        self._in_torch = in_torch
        self._transition = Transition(Action.EXPORT)
        self._given: tuple[tuple, dict] = (), {}
        self._new: BuiltGraph | None = None
        """The graph that this call has built."""
        self._excludes = 0
        """Number of the submodule that this rank wants to stay in PyTorch; 0 for none."""
        self._why_excluded = ""
        self._random_states: GlobalStates | None = None
        """States before the run of a graph that may not hold; None where nothing in PyTorch draws from them."""
        self._buffer_states: BufferStates | None = None
        """Buffers before the run of a graph that may not hold; None for other graphs."""

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Return the result of the module. All ranks, as far as the scope of the call makes them agree."""
        transitions = self._transitions
        # before the vote: a rank that fails after it leaves the others alone with their collectives
        self._given = args, kwargs
        self._take_apart()
        observed = self._observe()
        self._transition = transitions.check(observed)
        if self._transition.action is Action.EXPORT:
            self._exclude_readers(transitions.note_changes(observed))
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
                action = self._ranks.advance(Entered(graph.digest, bool(graph.effects.guards)))
            elif isinstance(action, BuildAgain):
                self._undo_run()
                if action.failed_guard is not None:
                    guards = graph.effects.guards
                    if action.failed_guard < len(guards):
                        self._guard_failed(guards[action.failed_guard][1])
                    else:
                        self._force("a value that another rank's graph was made for has changed")
                graph = self._enter(self._observe())
                action = self._ranks.advance(Entered(graph.digest, bool(graph.effects.guards)))
            else:
                assert isinstance(action, Run)
                if self._in_torch is not None:
                    result = self._in_torch()
                    self._ranks.advance(Ran(None))
                    return result
                tensors, action = self._run_graph(graph)
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
        builder.output.replay()
        if state.builds:
            transitions.forget(self._new)
        clear = error
        if state.concerns_building and not self._is_users(error):
            clear = explain(error, self._runtime.module, builder.fallback_policy.failed_place)
        if state.builds and isinstance(clear, ExportError) and transitions.graphs:
            reasons = "; ".join(self._transition.reasons)
            clear = type(clear)(f"{clear} [a new graph was needed: {reasons}; earlier ones are kept]")
        falls_back = self._runtime.config.fallback == "warn" and isinstance(clear, (ExportError, RankError))
        return clear, self._ranks.fail(str(clear), falls_back).fall_back

    # -- before the run ---------------------------------------------------------------------------------------------

    def _take_apart(self) -> None:
        args, kwargs = self._given
        self._arguments = self._runtime.take_apart(self._manager, args, kwargs, self._transitions.numbers.inputs)

    def _observe(self) -> Observed:
        return self._transitions.observe(self._arguments, self._runtime.graph_subscribers)

    def _exclude_readers(self, reasons: Mapping[str, str]) -> None:
        """Let submodules that read what changes often stay in PyTorch.

        Args:
            reasons: why, by path; "" stands for the model itself, which cannot.
        """
        for path, reason in reasons.items():
            if not self._runtime.excluded.add_alone(path, reason) and path == "":
                self._slow(f"the forward of {type(self._runtime.module).__name__} {reason}")

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
            self._slow(f"the forward of {type(self._runtime.module).__name__} {read.what()}")

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

    def _slow(self, why: str) -> None:
        """Warn once that each new value is exported."""
        if why not in self._runtime.slow_attributes:
            self._runtime.slow_attributes.add(why)
            get_logger().warning(
                "%s: each new value is exported, which takes seconds; use the value in tensor arithmetic only, give it "
                "as a tensor argument, or move that code into a submodule, which then stays in PyTorch", why
            )  # fmt: skip

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
        """Carry out the transition; what a failure teaches is tried again, while other ranks wait for this one."""
        while True:
            transition, self._new = self._transition, None
            try:
                # an export runs the module, and its result must not depend on whether there was one
                with preserved(self._runtime.module) if transition.action.builds else contextlib.nullcontext():
                    graph = self._transitions.enter(
                        transition, observed, self._arguments, self._runtime.graph_subscribers
                    )
            except BaseException as error:
                reason = self._learned(error)
                if reason is None:
                    raise
                self._force(reason)
                observed = self._observe()
                continue
            if transition.action.builds:
                self._new = graph
                self._runtime.observe_runs(graph)
            return graph

    def _learned(self, error: BaseException) -> str | None:
        """Return why the module is exported again after `error`, some of it in PyTorch then; None if that is no help.

        Raises:
            ExportError: all of the module would have to run in PyTorch.
        """
        if isinstance(error, AttributeInputError):
            return self._no_input(error.places, str(error))
        if isinstance(error, StartValuesError):
            known = self._transitions.builder.start_values
            if error.places <= known:
                raise RuntimeError(f"{error}, and its values cannot be put back") from error
            known |= error.places
            return str(error)
        if isinstance(error, AttributeChangedError):
            return self._carry_over(error)
        if isinstance(error, ArgumentInputError):
            return self._no_numbers(error.names, str(error))
        changes, tracer = self._transitions.changes, self._transitions.builder.tracer
        doubtful = isinstance(error, Exception) and self._ranks.state.builds and not self._is_users(error)
        why = f"the export failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
        if doubtful and changes.untried:  # it worked without them
            return self._no_input(changes.untried, why)
        numbers = tracer.numbers if doubtful and tracer is not None else {}
        if any(name in self._transitions.numbers.inputs for name in numbers):
            return self._no_numbers(numbers, why)
        try:
            reason = self._moved_to_pytorch(error)
        except ExportError:
            if not doubtful or not changes.untried_carried:
                raise
            reason = None
        if reason is None and doubtful and changes.untried_carried:
            return self._no_input(changes.untried_carried, why)
        return reason

    def _moved_to_pytorch(self, error: BaseException) -> str | None:
        """Let PyTorch run the part that has failed; return why that helps, None if it does not.

        Raises:
            ExportError: all of the module would have to run in PyTorch.
        """
        excluded, builder = self._runtime.excluded, self._transitions.builder
        if isinstance(error, ValueReadError):
            return excluded.exclude(error)
        if isinstance(error, Unexportable):
            place = builder.fallback_policy.failed_place
            assert place is not None
            module = excluded.smallest_around(place.path)
            where = f"{error}; {place.line}" if place.line else str(error)
            return excluded.exclude(ValueReadError(module, "calls an operator", where))
        if not isinstance(error, Exception) or not self._ranks.state.builds or self._is_users(error):
            return None
        if builder.fallback_policy.learn(str(error)):
            return str(error).splitlines()[0]
        return builder.smaller_parts.move(error)

    def _is_users(self, error: BaseException) -> bool:
        """Return True for an error that PyTorch raises as well."""
        builder = self._transitions.builder
        if builder.tracer is not None and error is builder.tracer.users_error:
            return True
        # in the run, PyTorch's nodes raise what the module raises; but it has run on the same arguments in the export
        return bool(torch_fallback.node_of(error)) and "export" not in builder.seconds

    def _outgrown(self, error: BaseException) -> str | None:
        """Return why the module is exported again after a graph that ran before has failed; None if that is no help.

        Python code may have used sizes of the first batch in a way that other sizes do not fit. Where ranks are in the
        middle of the collectives of a graph, none of them can build another one.
        """
        state, builder = self._ranks.state, self._transitions.builder
        failed_in_node = bool(torch_fallback.node_of(error)) or "while running" in str(error)
        if state.builds or state.scope is not Scope.ALONE or not isinstance(error, Exception) or not failed_in_node:
            return None
        cause = cause_of(error)
        if self._runtime.guard_failures.happens_often(cause):
            builder.smaller_parts.move(error)
        return f"the graph cannot run with these arguments: {cause}"

    def _carry_over(self, error: AttributeChangedError) -> str:
        """Make inputs and outputs of the graph of what the forward changes for the next call.

        Raises:
            ExportError: a number cannot be carried over, and the model's own forward reads it.
        """
        transitions, excluded = self._transitions, self._runtime.excluded
        changes, finder = transitions.changes, PlaceFinder(self._runtime.module)
        done = []
        for place, read in error.reads.items():
            value = finder.value_at(place)
            name = place.named(type(self._runtime.module).__name__)
            if can_be_input(value) and not changes.is_refused(place):
                changes.add(place, read)
                done.append(f"{name}, which the forward changes, is carried over from call to call")
            elif is_number(value) or excluded.own_path(read.module):
                done.append(self._leave_to_python(place, read))
            else:
                transitions.builder.settled_attributes.add(place)
                done.append(f"{name} stays what it was")
                get_logger().warning("the forward %s; the graph takes it for a constant", read)
        return "; ".join(done)

    def _leave_to_python(self, place: Place, read: ValueReadError) -> str:
        """Let the submodule that reads a number, and changes it for the next call, stay in PyTorch.

        Where that is the model's own forward, each value of the number has a graph of its own instead.

        Raises:
            ExportError: it is the model's own forward, and the number is no attribute.
        """
        builder = self._transitions.builder
        if self._runtime.excluded.own_path(read.module) or place.steps[-1][0] != ATTRIBUTE or place.root[0] != MODULE:
            return self._runtime.excluded.exclude(read)
        builder.counted_by_value.add(place)
        builder.start_values.add(place)
        self._slow(f"the forward of {type(self._runtime.module).__name__} {read}")
        return f"each value of {place.named(type(self._runtime.module).__name__)} has a graph of its own"

    def _no_input(self, places: Sequence[Place], why: str) -> str:
        """Take attributes out of the inputs of the graph; the submodules that read them stay in PyTorch instead."""
        transitions = self._transitions
        tracer = transitions.builder.tracer
        reads = tracer.attributes.reads if tracer is not None and tracer.attributes is not None else {}
        text = transitions.changes.refuse(places, why)
        for place in places:
            if place in transitions.changes.carried:
                self._leave_to_python(place, transitions.changes.carried[place])
                continue
            readers = reads[place].readers if place in reads else []
            paths = [self._runtime.excluded.own_path(module) for module in readers] or [""]
            self._exclude_readers(dict.fromkeys(paths, transitions.changes.why(place)))
        return text

    def _no_numbers(self, names: Iterable[str], why: str) -> str:
        """Let numbers among the arguments be constants of the graph again; return why it is another one."""
        self._transitions.numbers.refuse(names)
        self._take_apart()
        text = f"argument {', '.join(names)} cannot be an input of the graph: {why}"
        self._slow(text)
        return text

    # -- the run ----------------------------------------------------------------------------------------------------

    def _run_graph(self, graph: BuiltGraph) -> tuple[Sequence[torch.Tensor], RankAction]:
        """Return the outputs of the graph, and what to do next."""
        self._runtime.graph_is_ready(graph)
        arguments = self._arguments
        may_draw = self._runtime.excluded.draw_random_numbers or any(read.random for _, read in graph.effects.guards)
        self._random_states = GlobalStates() if may_draw else None
        may_repeat = graph.effects.guards or self._runtime.excluded.reasons
        self._buffer_states = BufferStates(self._runtime.excluded) if may_repeat else None
        try:
            given = list(arguments.tensors)
            if self._manager.training:
                for i in graph.effects.changed:
                    given[i] = given[i].clone()  # the caller's memory changes, and a backward may need what it holds
            inputs = graph.info.construct_inputs(dict(zip(arguments.names, given, strict=True)))
            for call, _ in graph.effects.left:
                CALLS.numbered(call).take_left()  # of an export, or of a run that has failed
            tensors = self._manager.run(graph.session, inputs)
            torch_fallback.keep_saved_with(tensors)
            if graph.returned_logits is not None:
                tensors = put_logits(tensors, graph.returned_logits, self._transitions.logit_reads.note)
            first_guard = graph.effects.first_guard
            guards = graph.effects.guards
            # behind the values of the guards there may be a token
            failed = value_guards.first_failed(guards, tensors[first_guard : first_guard + len(guards)])
        except BaseException as error:
            self._refuse_alone(error)
            reason = self._learned(error) or self._outgrown(error)
            if reason is None:
                raise
            self._force(reason)
            return [], self._ranks.advance(BuildAnew())
        return tensors, self._ranks.advance(Ran(failed))

    def _undo_run(self) -> None:
        """Take back what PyTorch's parts have done in a run that did not hold: the call runs another graph."""
        if self._random_states is not None:
            self._random_states.restore()
        if self._buffer_states is not None:
            self._buffer_states.restore()

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
