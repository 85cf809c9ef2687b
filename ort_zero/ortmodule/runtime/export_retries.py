"""Decides what an export or a run that has failed changes for the next attempt to build a graph.

:class:`.runtime.forward_call.ForwardCall` asks after each failure: the part that failed stays in PyTorch, or
an attribute or number that was an input of the graph is a constant of it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from ort_zero.errors import ExportError
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat.shared_memory import overlap
from ort_zero.ortmodule.compat.torch_onnx import Unexportable
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.error_messages import cause_of
from ort_zero.ortmodule.runtime.export.attribute_inputs import AttributeInputError, can_be_input
from ort_zero.ortmodule.runtime.export.attribute_paths import ATTRIBUTE, MODULE, Place, PlaceFinder, is_number
from ort_zero.ortmodule.runtime.export.attribute_records import AttributeChangedError, StartValuesError
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export.tracer import ArgumentInputError
from ort_zero.ortmodule.runtime.guards.value_guards import GuardFailures
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.rank_agreement import RankAgreement
from ort_zero.ortmodule.runtime.rank_protocol import Scope
from ort_zero.ortmodule.runtime.transitions import GraphTransitionManager


class RetriedRuntime(Protocol):
    """The interface that :class:`ExportRetries` needs of the module's runtime."""

    module: torch.nn.Module
    ranks: RankAgreement
    excluded: ExcludedModules
    guard_failures: GuardFailures
    slow_attributes: set[str]


class ExportRetries:
    """Decides for one forward call what its next attempt to build a graph does otherwise.

    Args:
        runtime: of the module.
        transitions: holds the graphs of the call's mode.
    """

    def __init__(self, runtime: RetriedRuntime, transitions: GraphTransitionManager):
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._transitions = transitions

    def after_failure(self, error: BaseException) -> str | None:
        """Return why the module is exported again after `error`, some of it in PyTorch then; None if that is no help.

        The arguments are to be taken apart anew then: other numbers among them may be constants of the graph.

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
        doubtful = isinstance(error, Exception) and self._ranks.state.builds and not self.is_users_own(error)
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

    def after_run(self, error: BaseException) -> str | None:
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

    def is_users_own(self, error: BaseException) -> bool:
        """Return True for an error that PyTorch raises as well."""
        builder = self._transitions.builder
        if builder.tracer is not None and error is builder.tracer.users_error:
            return True
        # in the run, PyTorch's nodes raise what the module raises; but it has run on the same arguments in the export
        return bool(torch_fallback.node_of(error)) and "export" not in builder.seconds

    def exclude_readers(self, reasons: Mapping[str, str]) -> None:
        """Let submodules that read what changes often stay in PyTorch.

        Args:
            reasons: why, by path; "" stands for the model itself, which cannot.
        """
        for path, reason in reasons.items():
            if not self._runtime.excluded.add_alone(path, reason) and path == "":
                self.warn_of_exports(f"the forward of {type(self._runtime.module).__name__} {reason}")

    def warn_of_exports(self, why: str) -> None:
        """Warn once that each new value is exported."""
        if why not in self._runtime.slow_attributes:
            self._runtime.slow_attributes.add(why)
            get_logger().warning(
                "%s: each new value is exported, which takes seconds; use the value in tensor arithmetic only, give it "
                "as a tensor argument, or move that code into a submodule, which then stays in PyTorch", why
            )  # fmt: skip

    def _moved_to_pytorch(self, error: BaseException) -> str | None:
        """Let PyTorch run the part that has failed; return why that helps, None if it does not.

        Raises:
            ExportError: all of the module would have to run in PyTorch.
        """
        excluded, builder = self._runtime.excluded, self._transitions.builder
        if isinstance(error, ValueReadError):
            if error.of_partition:
                self._tell_of_lost_change(error)
            return excluded.exclude(error)
        if isinstance(error, Unexportable):
            place = builder.fallback_policy.failed_place
            assert place is not None
            module = excluded.smallest_around(place.path)
            where = f"{error}; {place.line}" if place.line else str(error)
            return excluded.exclude(ValueReadError(module, "calls an operator", where))
        if not isinstance(error, Exception) or not self._ranks.state.builds or self.is_users_own(error):
            return None
        if builder.fallback_policy.learn(str(error)):
            return str(error).splitlines()[0]
        return builder.smaller_parts.move(error)

    def _tell_of_lost_change(self, error: ValueReadError) -> None:
        """Warn that DeepSpeed drops what a submodule puts into a partitioned weight once the submodule has run.

        Raises:
            ExportError: it is the model's own forward, whose code outside of submodules has no such end.
        """
        what = f"{error}, a weight of which each rank has a part under ZeRO-3"
        way_out = (
            "change it outside of the forward, in deepspeed.zero.GatheredParameters(weight, modifier_rank=0), or train "
            "under ZeRO-2"
        )
        path = self._runtime.excluded.own_path(error.module)
        if not path:
            refused = ExportError(f"the forward {what}: {way_out}")
            refused.concerns_parts = True
            raise refused
        get_logger().warning(
            "%s %s: the call uses it, and DeepSpeed drops it afterwards, also without ort_zero; to keep it, %s",
            path, what, way_out,
        )  # fmt: skip

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
            if read.moves or isinstance(value, torch.Tensor) and self._is_shared(place, value):
                done.append(excluded.exclude(read))  # other places have its memory, or get it
            elif can_be_input(value) and not changes.is_refused(place):
                changes.add(place, read)
                done.append(f"{name}, which the forward changes, is carried over from call to call")
            elif is_number(value) or excluded.own_path(read.module):
                done.append(self._leave_to_python(place, read))
            else:
                transitions.builder.settled_attributes.add(place)
                done.append(f"{name} stays what it was")
                get_logger().warning("the forward %s; the graph takes it for a constant", read)
        return "; ".join(done)

    def _is_shared(self, place: Place, value: torch.Tensor) -> bool:
        """Return whether a tensor that the forward changes shares memory with a weight, or with another read one."""
        tracer, module = self._transitions.builder.tracer, self._runtime.module
        reads = tracer.attributes.reads if tracer is not None and tracer.attributes is not None else {}
        others = [read.value for other, read in reads.items() if other != place]
        others += [*module.parameters(), *module.buffers()]
        return any(overlap(value, other) for other in others if isinstance(other, torch.Tensor) and other is not value)

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
        self.warn_of_exports(f"the forward of {type(self._runtime.module).__name__} {read}")
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
            self.exclude_readers(dict.fromkeys(paths, transitions.changes.why(place)))
        return text

    def _no_numbers(self, names: Iterable[str], why: str) -> str:
        """Let numbers among the arguments be constants of the graph again; return why it is another one."""
        self._transitions.numbers.refuse(names)
        text = f"argument {', '.join(names)} cannot be an input of the graph: {why}"
        self.warn_of_exports(text)
        return text
