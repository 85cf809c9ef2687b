"""Tell how the dimensions of a dense tensor lie in memory, as in channels-last, and copy tensors into that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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


def in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose dimensions lie in memory in an order: the tensor itself, or a copy."""
    outermost_first = tensor.permute(order)
    if outermost_first.is_contiguous():
        return tensor
    return outermost_first.contiguous().permute(inverse(order))
