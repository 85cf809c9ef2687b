"""Gathers parameters and reduces gradients when ORT runs the nodes of a graph's collectives.

A node knows its executor and its event by two integers. An executor is held by its graph and found through a weak
reference: a graph that is exported again leaves nothing behind.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ort_zero.compat.deepspeed_parameters import number_of
from ort_zero.ortmodule.onnx_edit.python_op import register_once
from ort_zero.ortmodule.runtime.zero3 import gathered_weights
from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Gather, Phase, Reduce
from ort_zero.ortmodule.runtime.zero3.gather_memory import GatherMemory
from ort_zero.ortmodule.runtime.zero3.gradient_sums import GradientSums
from ort_zero.ortmodule.runtime.zero3.kept_weights import KeptWeights, NextUses
from ort_zero.ortmodule.runtime.zero3.node_names import GATHER_FUNCTION, REDUCE_FUNCTION
from ort_zero.ortmodule.runtime.zero3.parameter_store import GradientStore, ParameterStore
from ort_zero.utils.named_ranges import GATHER, REDUCE, named_range

BUCKET_ELEMENTS = 1 << 20
"""Maximum number of elements of a collective that small gathers started ahead share; a larger gather has its own."""

executors: weakref.WeakValueDictionary[int, CollectiveExecutor] = weakref.WeakValueDictionary()
"""The executors that some graph still holds, by their number."""
_numbers = itertools.count()


@dataclass(slots=True)
class Counters:
    """Counts of what an executor has done since it was made."""

    gathers: int = 0
    gathered_elements: int = 0
    """Number of elements of the weights that did not stay whole from an earlier event."""
    waits: int = 0
    """Number of gathers that no prefetch had started."""
    reduces: int = 0


class StartedGather:
    """One collective that was started ahead, for one or more events.

    Args:
        handle: see :meth:`~ort_zero.ortmodule.runtime.zero3.parameter_store.ParameterStore.start`.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Any):
        self._handle = handle

    def wait(self, store: ParameterStore) -> None:
        """Return when the data is there; a second call returns at once."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            store.wait(handle)


class CollectiveExecutor:
    """Carries out the plan of one graph.

    Args:
        plan: the plan that was put into the graph.
        parameters: the module's parameters by graph input name.
        store: gathers and reduces them; if the plan gathers nothing it only has to take gradients.
        kept: the weights of the model that stay whole, and how much may be gathered; None gathers for each use.
        sums: shared by the executors of one model; a loss may hang on runs of several of its graphs.
        memory: from which `store` takes what it gathers; None if that is not planned.
    """

    def __init__(
        self,
        plan: CollectivePlan,
        parameters: Mapping[str, Any],
        store: ParameterStore | GradientStore,
        kept: KeptWeights | None = None,
        sums: GradientSums | None = None,
        memory: GatherMemory | None = None,
    ):
        self.memory = memory
        self.number = next(_numbers)
        self.plan = plan
        # of a store that only takes gradients nothing else is asked: its plan gathers nothing
        self.store = cast(ParameterStore, store)
        self.kept = kept or KeptWeights()
        self.prefetch_elements = self.kept.limits.prefetch
        self.counters = Counters()
        self.error: BaseException | None = None
        """The exception that a node has raised, of which ORT passes on the text only."""
        self.weights_read_in_torch: frozenset[str] = frozenset()
        """Names of the weights that are read by nodes that run in PyTorch, and that these may need again in their
        backward."""
        self.without_gradient: frozenset[str] = frozenset()
        """Names of the weights to which the backward that runs does not lead; ONNX Runtime computes zeros for them."""
        self.sums = sums or GradientSums()
        self._parameters = [[parameters[name] for name in event.weights] for event in plan.events]
        self._ids = [{id(parameter) for parameter in of_event} for of_event in self._parameters]
        self._numel = {
            id(parameter): plan.weights[name].numel
            for event, of_event in zip(plan.events, self._parameters, strict=True)
            for name, parameter in zip(event.weights, of_event, strict=True)
        }
        self._next_uses = NextUses(plan, self._parameters)
        self._backward_follows = True
        self._reduced = {name: parameters[name] for _, event in plan.reduces() for name in event.weights}
        self._digest = zlib.crc32(" ".join(self._reduced).encode())
        self._size = [sum(plan.weights[name].numel for name in event.weights) for event in plan.events]
        self._sequence = {phase: [i for i, _ in plan.gathers(phase)] for phase in Phase}
        self._position = {i: (seq, at) for seq in self._sequence.values() for at, i in enumerate(seq)}
        self.ahead: dict[int, tuple[StartedGather | None, list[Any]]] = {}
        """For each event to come, by its index: the gather that was started for it, and the parameters that it will
        have to release; the gather is None if all of those are kept from an earlier event."""
        executors[self.number] = self

    def new_trigger(self, device: Any) -> torch.Tensor:
        """Return the trigger of a run that starts now; it requires grad, so that autograd calls the run's backward."""
        trigger = torch.zeros(1, device=device).requires_grad_()
        self._backward_follows = torch.is_grad_enabled()
        if self._reduced and torch.is_grad_enabled():
            self.sums.expect_backward(
                trigger, self._reduced, self._digest, whole_parameters=not self.plan.gathers_weights
            )
        return trigger

    @named_range(GATHER)
    def gather(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the full weights of event `index`, and start the next gathers of its phase.

        All ranks must call this.
        """
        event = self.plan.events[index]
        assert isinstance(event, Gather)
        parameters = self._parameters[index]
        sequence, at = self._position[index]
        if at == 0:
            if self.memory is not None:
                self.memory.begin_phase(forward=event.phase is Phase.FORWARD)
            self._finish_all()
            if event.phase is Phase.FORWARD:  # nothing stays from a run without a backward: weights may have changed
                self._release_kept()
        if self.memory is not None:
            self.memory.begin_event(index)
        stayed = [p for p in self.kept.take(parameters) if not self.store.partitioned([p])]
        mine = list(stayed)
        try:
            mine += self._finish(index)
            self.counters.waits += self._gather_missing(parameters, mine)
        except BaseException:
            self.store.release(mine)
            raise
        # Taken before anything is started ahead: a later event may hold the same parameter.
        weights = tuple(parameter.data.detach() for parameter in parameters)
        for name, weight, parameter in zip(event.weights, weights, parameters, strict=True):
            if name in self.weights_read_in_torch:
                gathered_weights.remember(weight, parameter, self.gather_again)
        taken: list[Any] = []
        try:
            self._start_ahead(sequence, at, mine, taken)
        finally:
            self.store.release([p for p in mine if not _among(p, taken) and not self._stays(index, p)])
        self.counters.gathers += 1
        self.counters.gathered_elements += self._size[index] - sum(self._numel[id(p)] for p in stayed)
        return weights

    @named_range(GATHER)
    def gather_again(self, parameters: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the full weights of `parameters`, outside of the plan's events. All ranks must call this."""
        mine: list[Any] = []
        if self.memory is not None:
            self.memory.begin_event(None)
        try:
            self._gather_missing(parameters, mine)
            return tuple(parameter.data.detach() for parameter in parameters)
        finally:
            self.store.release(mine)

    @named_range(REDUCE)
    def reduce(self, index: int, gradients: Sequence[torch.Tensor]) -> None:
        """Hand the gradients of event `index` to their parameters, those that no other run will add to.

        All ranks must call this.

        Args:
            index: index of the event.
            gradients: behind them may come values for which the event has only waited.
        """
        if not self.sums.backward_reduces_parameters():
            return
        event = self.plan.events[index]
        assert isinstance(event, Reduce)
        names = event.gradients
        given = []
        reduced = zip(event.weights, self._parameters[index], names, gradients[: len(names)], strict=True)
        for weight, parameter, name, gradient in reduced:
            found = None if weight in self.without_gradient else gradient
            whole = self.sums.add(parameter, found, name in self.plan.own_memory)
            if whole is not None:
                given.append((parameter, *whole))
        if given:
            self.store.reduce(given)
        self.counters.reduces += 1

    def drain(self) -> None:
        """Partition what is kept, and what was started ahead when it is there: no parameter stays whole or in flight.

        An error keeps none of the others from being finished; the first one is raised at the end.
        """
        try:
            self._release_kept()
        finally:
            self._finish_all()

    def _release_kept(self) -> None:
        """Partition those of the graph's weights that are kept."""
        self.store.release(self.kept.take(itertools.chain(*self._parameters)))

    def _stays(self, index: int, parameter: Any) -> bool:
        """Keep a weight that event `index` has used until its next use, if that is near; return whether it is kept."""
        limits = self.kept.limits
        near = self._next_uses.is_near(
            index, parameter, distance=limits.reuse_distance, backward=self._backward_follows
        )
        return near and self.kept.add(parameter, self._numel[id(parameter)], self.ahead_elements())

    def _finish_all(self) -> None:
        first: BaseException | None = None
        for index in list(self.ahead):
            try:
                self.store.release(self._finish(index))
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def parameters_of(self, index: int) -> Sequence[Any]:
        """Return the parameters that event `index` gathers or reduces."""
        return self._parameters[index]

    def ahead_elements(self) -> int:
        """Return how many elements are gathered, or being gathered, ahead of their use."""
        return sum(self._size[i] for i in self.ahead)

    def _gather_missing(self, parameters: Sequence[Any], mine: list[Any]) -> bool:
        """Gather those of `parameters` that are not here; add to `mine` what the caller has to release.

        Returns:
            Whether some of them were not even on their way.
        """
        for parameter in parameters:
            if self.store.in_flight(parameter):
                mine += self._take_over(parameter, parameters)
        missing = self.store.partitioned(parameters)
        if missing:
            self.kept.take(missing)  # somebody else has partitioned them
            self.store.wait(self.store.start(missing))
            mine += missing
        return bool(missing)

    def _start_ahead(self, sequence: list[int], at: int, mine: list[Any], taken: list[Any]) -> None:
        """Start the next gathers that fit into the window; add to `taken` those of `mine` that one takes over."""
        room = self.prefetch_elements - self.ahead_elements()
        following = sequence[at + 1 : at + 2]
        if 2 * room < self.prefetch_elements and following and following[0] in self.ahead:
            return  # each collective has a price of its own: wait until several gathers fit
        bucket: list[tuple[int, list[Any]]] = []
        started: list[Any] = []
        elements = 0
        for index in sequence[at + 1 :]:
            if index in self.ahead or self.kept.has_all(self._ids[index]):
                continue
            size = self._size[index]
            if size > room:
                break
            again = [p for p in self._parameters[index] if _among(p, mine) and not _among(p, taken)]
            missing = [p for p in self.store.partitioned(self._parameters[index]) if not _among(p, started)]
            if not missing and not again:
                continue
            room -= size
            self.ahead[index] = (None, again)
            taken += again
            if missing:
                if elements + size > BUCKET_ELEMENTS:
                    self._start(bucket)
                    bucket, elements = [], 0
                bucket.append((index, missing))
                self.kept.take(missing)
                started += missing
                elements += size
        self._start(bucket)

    def _start(self, bucket: list[tuple[int, list[Any]]]) -> None:
        """Start one collective for the parameters of all events in `bucket`."""
        if bucket:
            gather = StartedGather(self.store.start([p for _, parameters in bucket for p in parameters]))
            for index, parameters in bucket:
                self.ahead[index] = (gather, self.ahead[index][1] + parameters)

    def _finish(self, index: int) -> list[Any]:
        """Wait for what was started for event `index`; return the parameters that the caller has to release."""
        gather, parameters = self.ahead.pop(index, (None, []))
        if gather is not None:
            try:
                gather.wait(self.store)
            except BaseException:
                # some were kept and not gathered anew, or another event of that collective has what came
                self.store.release([p for p in parameters if not self.store.in_flight(p)])
                raise
        return list(parameters)

    def _take_over(self, parameter: Any, wanted: Sequence[Any]) -> list[Any]:
        """Finish the gather that another event started for `parameter`; keep what is wanted, release the rest."""
        for index, (_, parameters) in list(self.ahead.items()):
            if _among(parameter, parameters):
                there = self._finish(index)
                self.store.release([p for p in there if not _among(p, wanted)])
                return [p for p in there if _among(p, wanted)]
        raise RuntimeError(f"parameter {number_of(parameter)} is in flight outside of the graph")


def _among(parameter: Any, parameters: Sequence[Any]) -> bool:
    return any(parameter is other for other in parameters)


def reduced_behind(nodes: Iterable[Any]) -> list[Any]:
    """Return the parameters that graphs reduce when a backward runs through these nodes of autograd's graph."""
    nodes = list(nodes)
    sums = {id(one.sums): one.sums for one in list(executors.values()) if not one.plan.gathers_weights}
    return [parameter for of_model in sums.values() for parameter in of_model.reduced_behind(nodes)]


class GatherFunction(torch.autograd.Function):
    """Runs the gather nodes; ORT calls ``forward`` with an object of its own for the context."""

    @staticmethod
    def forward(ctx, executor, index, token, *anchor):
        """Return a token and the full weights of event `index`."""
        owner = executors[executor]
        try:
            with torch.no_grad():
                return (torch.zeros(1), *owner.gather(index))
        except BaseException as error:
            owner.error = error
            raise

    @staticmethod
    def backward(ctx, *grads):
        """Never called: the nodes are put in after ORT made the gradient graph."""
        raise RuntimeError("a gather node is not differentiable")


class ReduceFunction(torch.autograd.Function):
    """The autograd Function that runs the reduce nodes."""

    @staticmethod
    def forward(ctx, executor, index, token, *gradients):
        """Hand over the gradients of event `index`; return a token."""
        owner = executors[executor]
        try:
            owner.reduce(index, gradients)
            return (torch.zeros(1),)
        except BaseException as error:
            owner.error = error
            raise

    @staticmethod
    def backward(ctx, *grads):
        """Never called: the nodes are put in after ORT made the gradient graph."""
        raise RuntimeError("a reduce node is not differentiable")


def register(register_function: Callable[[str, type], None]) -> None:
    """Register the two functions with ORT, if this process has not done so yet.

    Args:
        register_function: see :func:`ort_zero.ortmodule.compat.ortmodule.register_function`.
    """
    register_once(register_function, {GATHER_FUNCTION: GatherFunction, REDUCE_FUNCTION: ReduceFunction})
