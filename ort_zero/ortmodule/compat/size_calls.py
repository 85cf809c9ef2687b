"""Finds what calls of PyTorch's functions make of sizes that a trace does not keep open, such as a number of pieces."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ort_zero.ortmodule.compat.trace_sizes import COUNT, ELEMENTS, NUMBER, RANK, TRUTH, SizeReads, sizes_of

_C: Any = torch._C
_SPLITS: dict[Any, str] = {
    **dict.fromkeys((torch.Tensor.split, torch.split), "split"),
    **dict.fromkeys((torch.Tensor.chunk, torch.chunk), "chunk"),
}
_ROWS = frozenset({torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind})
_SQUEEZES = frozenset({torch.Tensor.squeeze, torch.squeeze, torch.Tensor.squeeze_})
"""Functions of whose result the number of axes depends on the shape of their argument."""


def note_call(
    sizes: SizeReads, func: Any, args: tuple, kwargs: dict, result: Any, before: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Record what a function has made of sizes that the trace does not keep open.

    Args:
        sizes: records it.
        func: the function.
        args: its arguments.
        kwargs: those that were given by name.
        result: what it returned.
        before: numbers among the arguments, and how often the trace read them before the call.
    """
    if func in _ROWS:
        count: Any = args[0].size(counted_axis(func, args, kwargs))  # a tensor while a trace is made
        sizes.note(count, NUMBER)
    elif isinstance(result, (list, tuple)) and result and isinstance(result[0], torch.Tensor):
        node = _C._get_value_trace(result[0]).node()
        pieces = next(iter(node.inputs())) if node.kind() == "prim::ListUnpack" else None
        # a node that runs another operator in PyTorch raises if it returns another number of tensors
        if pieces is not None and pieces.node().kind().startswith("aten::"):
            sizes.note_value(pieces, COUNT, functools.partial(_pieces, func, args, kwargs))
    elif isinstance(result, torch.Tensor):
        if func in _SQUEEZES:
            sizes.note(result, RANK)
        for number, uses in before:
            if uses_of(number) == uses and number is not result:
                sizes.note(number, ELEMENTS)


def have_one_shape(sizes: SizeReads, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape; record that Python depends on it."""
    if one.dim() != other.dim():
        return False
    for size, other_size in zip(one.shape, other.shape, strict=True):
        same: Any = size == other_size  # a tensor while a trace is made
        sizes.note(same, TRUTH)
        if not same:
            return False
    return True


def _pieces(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return, as tensors of the trace, what decides into how many pieces a function takes a tensor apart."""
    if func in _SPLITS and len(args) > 1 and isinstance(args[1], int):
        size: Any = args[0].size(counted_axis(func, args, kwargs))
        step = args[1] if _SPLITS[func] == "split" else (size + args[1] - 1) // args[1]
        return [(size + step - 1) // step]
    return [size for given in args if isinstance(given, torch.Tensor) for size in sizes_of(given)]


def counted_axis(func: Any, args: tuple, kwargs: dict) -> int:
    """Return the axis along which a function takes a tensor apart."""
    if "dim" in kwargs:
        return kwargs["dim"]
    position = 1 if func in _ROWS else 2
    return args[position] if len(args) > position else 0


def uses_of(tensor: torch.Tensor) -> int:
    """Return how often the trace reads a tensor so far."""
    return len(_C._get_value_trace(tensor).uses())


def numbers_among(given: Any) -> Iterator[torch.Tensor]:
    """Yield the single numbers, as sizes are in a trace, among the arguments of a function, in lists and tuples too."""
    if isinstance(given, torch.Tensor):
        if given.dim() == 0 and not given.requires_grad:
            yield given
    elif isinstance(given, dict):
        for part in given.values():
            yield from numbers_among(part)
    elif isinstance(given, (tuple, list)):
        for part in given:
            yield from numbers_among(part)
    elif isinstance(given, slice):
        yield from numbers_among((given.start, given.stop, given.step))
