"""Runs a function of tensors in PyTorch as one node of an ONNX graph, with PyTorch's own gradient.

The node is a PythonOp of ORT. Its forward runs the function under autograd; its backward runs what autograd recorded.
In between only what autograd saved is kept, in memory of its own: ORT may give the buffer of an input or of an output
to another value as soon as no node of the graph needs it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

Function = Callable[..., Sequence[torch.Tensor]]

_failures: list[BaseException] = []


def take_failure() -> BaseException | None:
    """Return the first exception that a node raised since the last call; ORT itself passes no exception on."""
    first = _failures[0] if _failures else None
    _failures.clear()
    return first


def node_class(name: str, function: Function) -> type[torch.autograd.Function]:
    """Return the autograd Function to register with ORT for nodes that run `function`.

    Args:
        name: of the class.
        function: takes as many tensors as the node has inputs, returns as many as it has outputs.
    """

    def forward(ctx, *inputs):
        try:
            return _forward(ctx, function, inputs)
        except BaseException as error:
            _failures.append(error)
            raise

    def backward(ctx, *gradients):
        try:
            return _backward(ctx, gradients)
        except BaseException as error:
            _failures.append(error)
            raise

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body)


class _Enter(torch.autograd.Function):
    """Gives a tensor a place in autograd's graph that does not keep its data alive, as a leaf would."""

    @staticmethod
    def forward(ctx, leaf, data):
        return data.view_as(data)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


class _OwnCopies:
    """Copies the saved tensors whose memory belongs to ORT; several views of one storage share one copy."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.storages = {_address(t) for t in inputs}
        self.saved: set[int] = set()
        self._copies: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        address = _address(tensor)
        self.saved.add(address)
        if address not in self.storages:
            return tensor.detach()
        base = self._copies.get(address)
        if base is None:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            base = self._copies[address] = whole.clone()
        elif base.dtype != tensor.dtype:
            return tensor.detach().clone()
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _forward(ctx: Any, function: Function, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    own = _OwnCopies(inputs)
    arguments = [t.detach() for t in inputs]
    if not wanted:
        with torch.no_grad():
            outputs = function(*arguments)
    else:
        leaf = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(own.pack, lambda tensor: tensor):
            for i in wanted:
                arguments[i] = _Enter.apply(leaf, arguments[i])
            ctx.starts = {i: get_gradient_edge(arguments[i]) for i in wanted}
            outputs = function(*arguments)
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in inputs]
        ctx.ends = [(get_gradient_edge(t), t.shape) if t.requires_grad else None for t in outputs]
    foreign = own.storages | own.saved
    results = []
    for output in outputs:
        result = output.detach().resolve_conj().resolve_neg().contiguous()
        if result.dtype == torch.bool:
            result = result.view(torch.uint8)  # ORT takes no booleans from DLPack
        results.append(result.clone() if _address(result) in foreign else result)
        foreign.add(_address(results[-1]))  # one output may be a view of another
    return tuple(results)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    ends, given = [], []
    for end, gradient in zip(ctx.ends, gradients, strict=True):
        # ORT fills in zeros of the first run's shape for an output that nothing depends on
        if end is not None and gradient is not None and gradient.shape == end[1]:
            ends.append(end[0])
            given.append(gradient)
    starts = list(ctx.starts.values())
    with torch.no_grad():
        found = torch.autograd.grad(ends, starts, given, allow_unused=True) if ends else [None] * len(starts)
    by_input = dict(zip(ctx.starts, found, strict=True))
    foreign = {_address(t) for t in given}
    results = []
    for i, (shape, dtype, device) in enumerate(ctx.shapes):
        gradient = by_input.get(i)
        if gradient is None:
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        gradient = gradient.detach().contiguous()
        results.append(gradient.clone() if _address(gradient) in foreign else gradient)
        foreign.add(_address(results[-1]))
    ctx.ends = ctx.starts = ctx.shapes = None
    return tuple(results)
