"""Tells whether tensors share memory: a change of the one in place is then a change of the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def shares_memory(
    index: int, tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor], *, in_autograd: bool = False
) -> bool:
    """Return whether one of `tensors` shares memory with another of them, or with one of `others`.

    Args:
        index: of the tensor that is looked at.
        tensors: holds it, and what it is compared with.
        others: further tensors to compare it with.
        in_autograd: whether views of one tensor share all of its memory: to autograd a change of one of them is a
            change of all.
    """
    one = tensors[index]
    compare = _same_storage if in_autograd else overlap
    return any(compare(one, other) for i, other in enumerate(tensors) if i != index) or any(
        compare(one, other) for other in others
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the elements of two tensors lie in memory that overlaps, from the first byte to the last."""
    if not _same_storage(one, other):
        return False
    (start, end), (other_start, other_end) = _range_of(one), _range_of(other)
    return start < other_end and other_start < end


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided or not one.numel() or not other.numel():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and of the byte behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
