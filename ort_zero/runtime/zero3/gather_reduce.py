"""What the gather and reduce nodes do when ORT runs them, and the table of events that one graph owns.

A node knows its table and event by two integers. Tables are held by their graph and found through weak references: a
graph that is exported again leaves nothing behind.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ort_zero.compat import torch_ddp
from ort_zero.compat.deepspeed_parameters import number_of
from ort_zero.compat.torch_autograd import LeafInGraph, comes_to, current_backward, has_hooks, leaves_behind
from ort_zero.errors import BridgeError
from ort_zero.onnx_edit.python_op import register_once
from ort_zero.runtime.zero3.collective_plan import Gather, Phase, Plan
from ort_zero.runtime.zero3.insert_collectives import GATHER, REDUCE
from ort_zero.utils.text import shortened

BUCKET = 1 << 20
"""Small gathers that are started ahead share one collective of at most so many elements; a larger one has its own."""


class GradientStore(Protocol):
    """Where the reduce nodes put gradients."""

    def reduce(self, gradients: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Hand each parameter the full gradient of this rank, and the memory with it if that is the gradient's own.

        Collective.
        """


class ParameterStore(GradientStore, Protocol):
    """How the bridge talks to ZeRO-3. All ranks make the same calls in the same order."""

    def partitioned(self, parameters: Sequence[Any]) -> list[Any]:
        """Return those whose data is not here and not on its way."""

    def in_flight(self, parameter: Any) -> bool:
        """Return True if the parameter's data is on its way."""

    def start(self, parameters: Sequence[Any]) -> Any:
        """Begin to gather `parameters`; return a handle. Collective."""

    def wait(self, handle: Any) -> None:
        """Return when the data of a started gather is there. Collective on some backends."""

    def release(self, parameters: Sequence[Any]) -> None:
        """Partition `parameters` again; tensors that were taken from them stay valid."""


@dataclass(slots=True)
class Counters:
    """What a table has done since it was made."""

    gathers: int = 0
    gathered_elements: int = 0
    waits: int = 0
    """Gathers that no prefetch had started."""
    reduces: int = 0


class _Flight:
    """One collective that was started ahead, for one or more events."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any):
        self.handle = handle

    def land(self, store: ParameterStore) -> None:
        """Wait, once."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            store.wait(handle)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose backward may come."""

    leaf: LeafInGraph
    """The trigger of the run."""
    parameters: Mapping[str, Any]
    digest: int
    whole: bool
    in_ddp: bool


class Sums:
    """Adds up what several runs give one parameter in one backward, so that it is reduced once, as in PyTorch.

    A loss may hang on several runs of the model (a pair of sentences, two views of one picture). Each run has reduce
    nodes of its own, but ZeRO and DDP want one gradient for each parameter and backward: a second one replaces the
    first, or is refused.

    Args:
        agree: called at the first gradient of each backward with a digest of what it will reduce, in which order.
    """

    def __init__(self, agree: Callable[[int], None] | None = None) -> None:
        self._runs: list[_Run] = []
        self._agree = agree
        self._backward = -1
        self._wanted = True
        self._missing: dict[int, int] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def expect(self, trigger: torch.Tensor, parameters: Mapping[str, Any], digest: int, whole: bool) -> None:
        """Take notice of a run that starts: a backward that reaches `trigger` will reduce `parameters`.

        Args:
            trigger: of the run.
            parameters: by name.
            digest: of which parameters these are.
            whole: the parameters are whole, so that the loss may use them outside of the run as well.
        """
        self._runs = [run for run in self._runs if run.leaf.alive()]
        self._runs.append(_Run(LeafInGraph(trigger), parameters, digest, whole, torch_ddp.in_forward()))

    def reduced_behind(self, nodes: Iterable[Any]) -> list[Any]:
        """Return the parameters that a backward through these nodes of autograd's graph would reduce."""
        leaves = leaves_behind(nodes)
        return [p for run in self._runs if run.leaf.among(leaves) for p in run.parameters.values()]

    def wanted(self) -> bool:
        """Return whether the backward that runs asks for gradients of parameters: ``autograd.grad`` may not."""
        if self._backward != current_backward():
            self._begin(current_backward())
        return self._wanted

    def add(self, parameter: Any, gradient: torch.Tensor, own_memory: bool) -> tuple[torch.Tensor, bool] | None:
        """Return the gradient to reduce, or None if another run of this backward has still to add to it.

        The second value says whether the parameter may keep its memory.
        """
        missing = self._missing.get(id(parameter), 1) - 1
        if missing > 0:
            self._missing[id(parameter)] = missing
            if id(parameter) in self._sums:
                self._sums[id(parameter)] += gradient
            else:
                # else ORT will use the memory for something else
                self._sums[id(parameter)] = gradient if own_memory else gradient.clone()
            return None
        self._missing.pop(id(parameter), None)
        before = self._sums.pop(id(parameter), None)
        return (gradient, own_memory) if before is None else (before.add_(gradient), True)

    def _begin(self, backward: int) -> None:
        self._backward = backward
        self._sums.clear()  # a backward that failed leaves some
        self._missing.clear()
        runs = [run for run in self._runs if run.leaf.in_current_backward()]
        self._wanted = bool(runs) or not self._runs
        if len(runs) > 1:
            for parameter in itertools.chain(*(run.parameters.values() for run in runs)):
                self._missing[id(parameter)] = self._missing.get(id(parameter), 0) + 1
        twice = _reduced_twice(runs)
        if runs and self._agree is not None:
            self._agree(zlib.crc32(repr([[run.digest for run in runs], twice]).encode()))
        if twice:
            raise BridgeError(
                f"{shortened(twice)} {'is' if len(twice) == 1 else 'are'} used in the loss "
                "outside of the model's forward as well (a penalty on weights?), and with "
                '"memory_efficient_gradients" the gradients from there and from the forward would be reduced apart: '
                "compute that part of the loss in the model's forward, let the optimizer do it (weight_decay), or set "
                '"ort_zero": {"memory_efficient_gradients": false}'
            )


def _reduced_twice(runs: list[_Run]) -> list[str]:
    """Return the names of the parameters that the backward comes to both ways, if anybody waits for their gradients.

    Where nobody does, the two gradients add up as they come.
    """
    return sorted(
        {
            name.removeprefix("_original_module.")
            for run in runs
            for name, parameter in run.parameters.items()
            if run.whole and (run.in_ddp or has_hooks(parameter)) and comes_to(parameter)
        }
    )


class Table:
    """The running side of one graph's plan.

    Args:
        plan: the plan that the graph was rewritten by.
        parameters: the module's parameters by graph input name.
        store: ZeRO-3, or whatever takes gradients if the plan gathers nothing, or a stand-in in unit tests.
        prefetch_elements: how many elements may be gathered ahead of their use, within one phase.
        sums: shared by the tables of one model; a loss may hang on runs of several of its graphs.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: dict[str, Any],
        store: ParameterStore | GradientStore,
        prefetch_elements: int = 0,
        sums: Sums | None = None,
    ):
        self.number = next(_numbers)
        self.plan = plan
        self.store = store
        self.prefetch_elements = prefetch_elements
        self.counters = Counters()
        self.error: BaseException | None = None
        self.live: LiveElements | None = None
        self.lends: frozenset[str] = frozenset()
        """Weights that nodes read which run in PyTorch, and may want again in their backward."""
        self.sums = sums or Sums()
        self._parameters = [[parameters[name] for name in event.weights] for event in plan.events]
        self._reduced = {name: parameters[name] for _, event in plan.reduces() for name in event.weights}
        self._digest = zlib.crc32(" ".join(self._reduced).encode())
        self._size = [sum(plan.weights[name].numel for name in event.weights) for event in plan.events]
        self._sequence = {phase: [i for i, _ in plan.gathers(phase)] for phase in Phase}
        self._position = {i: (seq, at) for seq in self._sequence.values() for at, i in enumerate(seq)}
        self._ahead: dict[int, tuple[_Flight | None, list[Any]]] = {}
        _tables[self.number] = self

    def new_trigger(self, device: Any) -> torch.Tensor:
        """Return the trigger of a run that starts now; it requires grad, so that autograd calls the run's backward."""
        trigger = torch.zeros(1, device=device).requires_grad_()
        if self._reduced and torch.is_grad_enabled():
            self.sums.expect(trigger, self._reduced, self._digest, whole=not self.plan.takes_weights)
        return trigger

    def gather(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the full weights of event `index`, and start the next gathers of its phase."""
        event = self.plan.events[index]
        assert isinstance(event, Gather)
        parameters = self._parameters[index]
        sequence, at = self._position[index]
        if at == 0:
            self.drain()
        mine: list[Any] = []
        try:
            mine += self._finish(index)
            for parameter in parameters:
                if self.store.in_flight(parameter):
                    mine += self._take_over(parameter, parameters)
            missing = self.store.partitioned(parameters)
            if missing:
                self.store.wait(self.store.start(missing))
                mine += missing
                self.counters.waits += 1
        except BaseException:
            self.store.release(mine)
            raise
        # Taken before anything is started ahead: a later event may hold the same parameter.
        weights = tuple(parameter.data.detach() for parameter in parameters)
        if self.live is not None:
            weights = tuple(self.live.track(w) if _among(p, mine) else w
                            for w, p in zip(weights, parameters, strict=True))  # fmt: skip
        if self.lends:
            self._lend(event.weights, weights, parameters)
        kept: list[Any] = []
        try:
            self._start_ahead(sequence, at, mine, kept)
        finally:
            self.store.release([p for p in mine if not _among(p, kept)])
        self.counters.gathers += 1
        self.counters.gathered_elements += sum(w.numel() for w in weights)
        if self.live is not None:
            self.live.note_ahead(self._ahead_elements())
        return weights

    def borrow(self, parameters: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the full weights of `parameters` outside of the plan's events. Collective."""
        mine: list[Any] = []
        try:
            for parameter in parameters:
                if self.store.in_flight(parameter):
                    mine += self._take_over(parameter, list(parameters))
            missing = self.store.partitioned(parameters)
            if missing:
                self.store.wait(self.store.start(missing))
                mine += missing
            return tuple(parameter.data.detach() for parameter in parameters)
        finally:
            self.store.release(mine)

    def _lend(self, names: Sequence[str], weights: Sequence[torch.Tensor], parameters: Sequence[Any]) -> None:
        if len(_lent) > MOST_LENT:
            for address in [a for a, lent in _lent.items() if lent.gone()]:
                del _lent[address]
        for name, weight, parameter in zip(names, weights, parameters, strict=True):
            if name in self.lends:
                storage = StorageWeakRef(weight.untyped_storage())
                # by its own address: one collective's weights share a storage
                _lent[weight.data_ptr()] = LentWeight(
                    weakref.ref(self), weakref.ref(parameter), storage, sample(weight)
                )

    def reduce(self, index: int, gradients: Sequence[torch.Tensor]) -> None:
        """Hand the gradients of event `index` to their parameters, those that no other run will add to.

        Behind the gradients may come values for which the event has only waited.
        """
        if not self.sums.wanted():
            return
        names = self.plan.events[index].gradients
        given = []
        for parameter, name, gradient in zip(self._parameters[index], names, gradients[: len(names)], strict=True):
            whole = self.sums.add(parameter, gradient, name in self.plan.own_memory)
            if whole is not None:
                given.append((parameter, *whole))
        if given:
            self.store.reduce(given)
        self.counters.reduces += 1

    def drain(self) -> None:
        """Finish all that was started ahead and partition it: no parameter stays in flight.

        An error keeps none of the others from being finished; the first one is raised at the end.
        """
        first: BaseException | None = None
        for index in list(self._ahead):
            try:
                self.store.release(self._finish(index))
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _ahead_elements(self) -> int:
        return sum(self._size[i] for i in self._ahead)

    def _start_ahead(self, sequence: list[int], at: int, mine: list[Any], kept: list[Any]) -> None:
        """Start the next gathers that fit into the window; add to `kept` those of `mine` that one takes as they are."""
        room = self.prefetch_elements - self._ahead_elements()
        following = sequence[at + 1 : at + 2]
        if 2 * room < self.prefetch_elements and following and following[0] in self._ahead:
            return  # each collective has a price of its own: wait until several gathers fit
        bucket: list[tuple[int, list[Any]]] = []
        started: list[Any] = []
        elements = 0
        for index in sequence[at + 1 :]:
            if index in self._ahead:
                continue
            size = self._size[index]
            if size > room:
                break
            again = [p for p in self._parameters[index] if _among(p, mine) and not _among(p, kept)]
            missing = [p for p in self.store.partitioned(self._parameters[index]) if not _among(p, started)]
            if not missing and not again:
                continue
            room -= size
            self._ahead[index] = (None, again)
            kept += again
            if missing:
                if elements + size > BUCKET:
                    self._start(bucket)
                    bucket, elements = [], 0
                bucket.append((index, missing))
                started += missing
                elements += size
        self._start(bucket)

    def _start(self, bucket: list[tuple[int, list[Any]]]) -> None:
        if bucket:
            flight = _Flight(self.store.start([p for _, parameters in bucket for p in parameters]))
            for index, parameters in bucket:
                self._ahead[index] = (flight, self._ahead[index][1] + parameters)

    def _finish(self, index: int) -> list[Any]:
        flight, parameters = self._ahead.pop(index, (None, []))
        if flight is not None:
            try:
                flight.land(self.store)
            except BaseException:
                # some were kept and not gathered anew, or another event of the flight has what came
                self.store.release([p for p in parameters if not self.store.in_flight(p)])
                raise
        return list(parameters)

    def _take_over(self, parameter: Any, wanted: list[Any]) -> list[Any]:
        """Finish the gather that another event started for `parameter`; keep what is wanted, release the rest."""
        for index, (_, parameters) in list(self._ahead.items()):
            if _among(parameter, parameters):
                there = self._finish(index)
                self.store.release([p for p in there if not _among(p, wanted)])
                return [p for p in there if _among(p, wanted)]
        raise RuntimeError(f"parameter {number_of(parameter)} is in flight outside the bridge")


def _among(parameter: Any, parameters: Sequence[Any]) -> bool:
    return any(parameter is other for other in parameters)


class LiveElements:
    """Counts the gathered elements that are alive at once (for benchmarks and tests: it copies every weight).

    Alive are the weights that ORT holds; ``peak_with_ahead`` counts those that were gathered ahead of their use too.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.peak_with_ahead = 0

    def note_ahead(self, elements: int) -> None:
        """Take notice of `elements` that are ahead of their use now."""
        self.peak_with_ahead = max(self.peak_with_ahead, self.current + elements)

    def track(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of `weight` whose memory reports its own end."""
        array = weight.cpu().numpy().copy()
        self.current += array.size
        self.peak = max(self.peak, self.current)
        weakref.finalize(array, self._gone, array.size)
        return torch.from_numpy(array)

    def _gone(self, size: int) -> None:
        self.current -= size


@dataclass(frozen=True, slots=True)
class LentWeight:
    """A gathered weight that ORT holds."""

    table: weakref.ref[Table]
    parameter: weakref.ref
    storage: StorageWeakRef
    sample: tuple

    def gone(self) -> bool:
        """Return True if ORT has let go of it, so that its memory may be somebody else's."""
        return self.storage.expired()

    def again(self, lenders: Sequence[LentWeight]) -> tuple[torch.Tensor, ...]:
        """Return the full weights of `lenders`. Collective."""
        return self.table().borrow([lent.parameter() for lent in lenders])


MOST_LENT = 4096
_lent: dict[int, LentWeight] = {}


def lent_at(tensor: torch.Tensor) -> LentWeight | None:
    """Return the gathered weight that `tensor` is; None for anything else that ORT has put in its place."""
    lent = _lent.get(tensor.data_ptr())
    return None if lent is None or lent.gone() or lent.sample != sample(tensor) else lent


def sample(tensor: torch.Tensor) -> tuple:
    """Return size and some elements: ORT computes in place where it can."""
    flat = tensor.detach().reshape(-1)
    return (flat.numel(), *flat[:: max(1, flat.numel() // 16)].tolist())


_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()


def live_tables() -> int:
    """Return the number of tables that some graph still holds."""
    return len(_tables)


def reduced_behind(nodes: Iterable[Any]) -> list[Any]:
    """Return the parameters that graphs reduce when a backward runs through these nodes of autograd's graph."""
    nodes = list(nodes)
    sums = {id(table.sums): table.sums for table in list(_tables.values()) if not table.plan.takes_weights}
    return [parameter for of_model in sums.values() for parameter in of_model.reduced_behind(nodes)]


class GatherFunction(torch.autograd.Function):
    """Body of the gather nodes; ORT calls ``forward`` with a stand-in for the context."""

    @staticmethod
    def forward(ctx, table, index, token, *anchor):
        """Return a token and the full weights of event `index`."""
        owner = _tables[table]
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
    """Body of the reduce nodes."""

    @staticmethod
    def forward(ctx, table, index, token, *gradients):
        """Hand over the gradients of event `index`; return a token."""
        owner = _tables[table]
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
    """Make the two functions known to ORT, once."""
    register_once(register_function, {GATHER: GatherFunction, REDUCE: ReduceFunction})
