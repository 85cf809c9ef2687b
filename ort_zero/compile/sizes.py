"""Compute the sizes of a call from the values of Dynamo's symbols."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ort_zero.compat.torch_graphs import SizeReader, Symbols
from ort_zero.compile.conversion.fragments import Dim, Size


def numbers(sizes: Iterable[Size], reader: SizeReader, symbols: Symbols) -> tuple[int, ...]:
    """Return sizes as numbers, for the values of a graph's symbols in one call."""
    return tuple(reader.compute(size.expression, symbols) if isinstance(size, Dim) else size for size in sizes)


def hint(size: Any) -> int:
    """Return a size as an int: a symbolic size has the value that it had in the traced call."""
    return size if isinstance(size, int) else size.node.hint
