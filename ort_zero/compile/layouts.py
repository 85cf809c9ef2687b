"""Compute the sizes and strides of a call's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ort_zero.compat.torch_graphs import SizeReader, Symbols
from ort_zero.compile.conversion.fragments import Dim, Size
from ort_zero.runtimes.memory_order import inverse


def numbers(sizes: Iterable[Size], reader: SizeReader, symbols: Symbols) -> tuple[int, ...]:
    """Return sizes as numbers, for the values of a graph's symbols in one call."""
    return tuple(reader.compute(size.expression, symbols) if isinstance(size, Dim) else size for size in sizes)


def sizes_and_strides(in_memory: Sequence[int], order: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a dense tensor from its sizes in memory and the order of its dimensions there."""
    tensor = torch.empty(in_memory, device="meta")
    tensor = tensor if order is None else tensor.permute(inverse(order))
    return tuple(tensor.shape), tensor.stride()
