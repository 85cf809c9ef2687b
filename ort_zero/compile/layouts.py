"""Compute the sizes of a call's tensors, and how the dimensions of dense ones lie in memory, as in channels-last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ort_zero.compat.torch_graphs import SizeReader, Symbols
from ort_zero.compile.conversion.fragments import Dim, Size


def numbers(sizes: Iterable[Size], reader: SizeReader, symbols: Symbols) -> tuple[int, ...]:
    """Return sizes as numbers, for the values of a graph's symbols in one call."""
    return tuple(reader.compute(size.expression, symbols) if isinstance(size, Dim) else size for size in sizes)


def hint(size: Any) -> int:
    """Return a size as an int: a symbolic size has the value that it had in the traced call."""
    return size if isinstance(size, int) else size.node.hint


def dense_order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a traced tensor, the outermost in memory first; None for a tensor with gaps."""
    sizes, strides = ([hint(number) for number in numbers] for numbers in (fake.shape, fake.stride()))
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return tuple(order)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes a permutation."""
    return tuple(order.index(dim) for dim in range(len(order)))


def sizes_and_strides(in_memory: Sequence[int], order: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a dense tensor from its sizes in memory and the order of its dimensions there."""
    tensor = torch.empty(in_memory, device="meta")
    tensor = tensor if order is None else tensor.permute(inverse(order))
    return tuple(tensor.shape), tensor.stride()


def in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose dimensions lie in memory in an order: the tensor itself, or a copy."""
    outermost_first = tensor.permute(order)
    if outermost_first.is_contiguous():
        return tensor
    return outermost_first.contiguous().permute(inverse(order))
