"""Runs a function of tensors in PyTorch as one node of an ONNX graph, with PyTorch's own gradient.

The node is a PythonOp of ORT. Its forward runs the function under autograd; its backward runs what autograd recorded.
In between only what autograd saved is kept, in memory of its own: ORT may give the buffer of an input or of an output
to another value as soon as no node of the graph needs it any more. Weights are not copied: those that ZeRO-3 gathered
are gathered again for the backward, all others stay where they are.

:mod:`.aten_op` makes such nodes; the runtime says which of their inputs are weights (:func:`memory_owners`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ort_zero.ortmodule.compat import torch_autograd
from ort_zero.ortmodule.compat.deepspeed_gathering import whole_tensors
from ort_zero.ortmodule.compat.ortmodule import contiguous
from ort_zero.ortmodule.compat.torch_modules import is_zero_tensor
from ort_zero.utils.named_ranges import IN_PYTORCH, named_range

Function = Callable[..., Sequence[torch.Tensor]]


class PartitionedWeight(Protocol):
    """A weight that ZeRO-3 gathers for the time of its use."""

    def again(self, weights: Sequence[PartitionedWeight]) -> Sequence[torch.Tensor]:
        """Return the full `weights`, gathered once more. All ranks must call this."""


PERSISTENT = object()
"""Stands for the owner of memory that outlives the run of a graph: a weight that is not partitioned."""

_owner_of: Callable[[torch.Tensor], Any] = lambda tensor: None  # noqa: E731
_failures: list[BaseException] = []
_recordings: list[_Recording] = []
"""What the nodes that have run in the forward at hand have saved for their backward."""


@contextlib.contextmanager
def memory_owners(owner_of: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Let nodes that run in the block know whose memory each of their inputs is.

    Args:
        owner_of: returns a :class:`PartitionedWeight`, :data:`PERSISTENT`, or None for memory of ORT's own.
    """
    global _owner_of
    before, _owner_of = _owner_of, owner_of
    try:
        yield
    finally:
        _owner_of = before


def take_failure() -> BaseException | None:
    """Return the first exception that a node raised since the last call, and forget what a failed run has saved.

    ORT itself passes no exception on.
    """
    first = _failures[0] if _failures else None
    _failures.clear()
    _recordings.clear()
    return first


@dataclass(slots=True, eq=False)
class _Recording:
    """What autograd recorded of one run of a node."""

    starts: dict[int, Any]
    """Edge of autograd's graph at each input that wants a gradient."""
    ends: list[Any]
    """Edge of autograd's graph at each output; None where no gradient comes from."""
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]
    gathered_again: list[_GatheredAgain]

    def forget(self) -> None:
        """Let go of everything that was saved."""
        self.starts, self.ends, self.gathered_again = {}, [], []


class _SavedByRun:
    """Belongs to the place of one run in autograd's graph: with it goes what the nodes of the run have saved."""

    def __init__(self, recordings: list[_Recording]):
        self._recordings = recordings

    def __del__(self) -> None:
        for recording in self._recordings:
            recording.forget()


def keep_saved_with(results: Sequence[torch.Tensor]) -> None:
    """Keep what the nodes of a forward run have saved for as long as a backward through its results can come.

    ORT itself would keep the contexts of the nodes until that backward runs, also when it never does.

    Args:
        results: what the run has given to autograd.
    """
    if not _recordings:
        return
    saved = _SavedByRun(_recordings.copy())
    _recordings.clear()
    for result in results:
        if result.grad_fn is not None:
            result.grad_fn.ort_zero_saved = saved  # type: ignore[attr-defined]
            return


@contextlib.contextmanager
def recorded_apart() -> Iterator[None]:
    """Let what the nodes of a run in the block save go at its end: its backward runs in the block as well."""
    before = _recordings.copy()
    _recordings.clear()
    try:
        yield
    finally:
        for recording in _recordings:
            recording.forget()
        _recordings[:] = before


def node_of(error: BaseException) -> str:
    """Return the name of the function of the node that raised `error`, empty if none did."""
    return getattr(error, _NODE_NAME, "")


def _named(error: BaseException, name: str) -> BaseException:
    with contextlib.suppress(AttributeError):  # an exception with slots
        setattr(error, _NODE_NAME, name)
    return error


_NODE_NAME = "_ort_zero_node"


def node_class(name: str, function: Function) -> type[torch.autograd.Function]:
    """Return the autograd Function to register with ORT for nodes that run `function`.

    Args:
        name: name of the class.
        function: takes as many tensors as the node has inputs, returns as many as it has outputs. With an attribute
            ``without_hooks`` that is true it is given copies, and what autograd saves is not looked at.
    """

    def forward(ctx, *inputs):
        try:
            return _forward(ctx, function, inputs)
        except BaseException as error:
            _failures.append(_named(error, name))
            raise

    def backward(ctx, *gradients):
        try:
            return _backward(ctx, gradients)
        except BaseException as error:
            _failures.append(_named(error, name))
            raise

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body)


class _Enter(torch.autograd.Function):
    """Gives a tensor a place in autograd's graph that does not keep its data alive, as a leaf would."""

    @staticmethod
    def forward(ctx, leaf, data, is_weight):
        # code may change its weights in place, and autograd lets nobody change a view that a Function has returned
        return data.data if is_weight else data.view_as(data)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient, None


@dataclass(slots=True)
class _SavedView:
    """A saved view of a weight that is partitioned until the backward."""

    weight: _GatheredAgain
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class _GatheredAgain:
    """A weight that is partitioned until the backward needs it."""

    weight: PartitionedWeight
    full: torch.Tensor | None = None
    """The whole weight, while the backward runs."""


class _OwnCopies:
    """Copies the saved tensors whose memory belongs to ORT; several views of one storage share one copy."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        found = {_address(t): _owner_of(t) for t in inputs}
        self.storages = set(found)
        self.saved: set[int] = set()
        self.persistent = {address for address, owner in found.items() if owner is PERSISTENT}
        self.gathered_again = {
            address: _GatheredAgain(owner) for address, owner in found.items() if owner not in (None, PERSISTENT)
        }
        self._copies: dict[int, torch.Tensor] = {}

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of an input is that of a weight, and not ORT's own."""
        address = _address(tensor)
        return address in self.persistent or address in self.gathered_again

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach()  # it has no storage that could be ORT's
        address = _address(tensor)
        self.saved.add(address)
        if address not in self.storages or address in self.persistent:
            return tensor.detach()
        if address in self.gathered_again:
            return _SavedView(self.gathered_again[address], tensor.size(), tensor.stride(), tensor.storage_offset())
        base = self._copies.get(address)
        if base is None:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            base = self._copies[address] = whole.clone()
        elif base.dtype != tensor.dtype:
            return tensor.detach().clone()
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _SavedView):
        full = saved.weight.full
        assert full is not None
        # the weights of one collective may share a storage, in which this one begins anywhere
        return full.as_strided(saved.size, saved.stride, full.storage_offset() + saved.offset)
    return saved


@contextlib.contextmanager
def _whole(weights: Sequence[_GatheredAgain]) -> Iterator[None]:
    """Have whole weights in the block. All ranks gather the same ones, whatever autograd saved on each."""
    try:
        if weights:
            partitioned = [saved.weight for saved in weights]
            for saved, full in zip(weights, partitioned[0].again(partitioned), strict=True):
                saved.full = full
        with _code_that_gathers(weights):
            yield
    finally:
        for saved in weights:
            saved.full = None


def _code_that_gathers(weights: Collection[_GatheredAgain]) -> contextlib.AbstractContextManager:
    """Return a context for code that might gather some of its weights: all of them are whole already."""
    return whole_tensors() if weights else contextlib.nullcontext()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@named_range(IN_PYTORCH)
def _forward(ctx: Any, function: Function, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    own = _OwnCopies(inputs)
    plain = getattr(function, "without_hooks", False)
    arguments = [t.detach().clone() if plain else t.detach() for t in inputs]
    gathers = _code_that_gathers(own.gathered_again.values())
    if not wanted:
        with torch.no_grad(), gathers:
            outputs = function(*arguments)
    else:
        leaf = torch.empty(0, requires_grad=True)
        hooks = contextlib.nullcontext() if plain else saved_tensors_hooks(own.pack, _unpack)
        with torch.enable_grad(), hooks, gathers:
            for i in wanted:
                arguments[i] = _Enter.apply(leaf, arguments[i], own.is_weight(arguments[i]))
            starts = {i: get_gradient_edge(arguments[i]) for i in wanted}
            outputs = function(*arguments)
        # an object of its own: ORT wants to hold the only reference to the context
        ctx.recording = _Recording(
            starts=starts,
            ends=[torch_autograd.BackwardEnd(t) if t.requires_grad else None for t in outputs],
            shapes=[(t.shape, t.dtype, t.device) for t in inputs],
            gathered_again=list(own.gathered_again.values()),
        )
        _recordings.append(ctx.recording)
    foreign = own.storages | own.saved
    results = []
    for output in outputs:
        result = contiguous(output.detach().resolve_conj().resolve_neg())
        if result.dtype == torch.bool:
            result = result.view(torch.uint8)  # ORT takes no booleans from DLPack
        results.append(result.clone() if _address(result) in foreign else result)
        foreign.add(_address(results[-1]))  # one output may be a view of another
    return tuple(results)


@named_range(IN_PYTORCH)
def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    recording: _Recording = ctx.recording
    ends, given = [], []
    for end, gradient in zip(recording.ends, gradients, strict=True):
        if end is not None and gradient is not None:
            ends.append(end)
            given.append(gradient)
    starts = list(recording.starts.values())
    with torch.no_grad(), _whole(recording.gathered_again):
        found = torch_autograd.gradients(ends, starts, given)
    by_input = dict(zip(recording.starts, found, strict=True))
    foreign = {_address(t) for t in given}
    results = []
    for i, (shape, dtype, device) in enumerate(recording.shapes):
        gradient = by_input.get(i)
        if gradient is None or is_zero_tensor(gradient):
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        gradient = contiguous(gradient.detach())
        results.append(gradient.clone() if _address(gradient) in foreign else gradient)
        foreign.add(_address(results[-1]))
    recording.forget()
    return tuple(results)
