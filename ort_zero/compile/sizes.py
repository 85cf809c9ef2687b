"""Read the values of Dynamo's symbols from the inputs of a call, and compute sizes from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from ort_zero.compile.conversion.fragments import Dim, Size

Symbols = tuple[int, ...]
"""The values of a graph's symbols in one call."""


class SymbolReader:
    """Reads the values of the symbols of a graph from the graph's inputs.

    Args:
        placeholders: the inputs of the graph, with fake tensors in ``meta["val"]``.
    """

    def __init__(self, placeholders: Sequence[Node]):
        self._sources: dict[Any, tuple[int, int | None]] = {}
        for index, node in enumerate(placeholders):
            fake = node.meta.get("val")
            if isinstance(fake, torch.SymInt):
                self._add(fake, index, None)
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    self._add(size, index, dim)

    def _add(self, size: Any, index: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self._sources.setdefault(size.node.expr, (index, dim))

    def __bool__(self) -> bool:
        """Return True if the graph has sizes that change."""
        return bool(self._sources)

    def knows(self, expression: Any) -> bool:
        """Return True if the graph's inputs tell the value of an expression."""
        return expression.free_symbols <= self._sources.keys()

    def read(self, arguments: Sequence[Any]) -> Symbols:
        """Return the values of the symbols in a call with these arguments."""
        return tuple(
            int(arguments[index]) if dim is None else arguments[index].shape[dim]
            for index, dim in self._sources.values()
        )

    def evaluate(self, sizes: Iterable[Size], symbols: Symbols) -> tuple[int, ...]:
        """Return sizes as numbers."""
        values = dict(zip(self._sources, symbols, strict=True))
        return tuple(int(size.expression.xreplace(values)) if isinstance(size, Dim) else size for size in sizes)


def hint(size: Any) -> int:
    """Return a size as an int: a symbolic size has the value that it had in the traced call."""
    return size if isinstance(size, int) else size.node.hint
