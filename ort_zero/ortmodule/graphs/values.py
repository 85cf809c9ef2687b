"""Read what Dynamo notes of the values in its graphs, and compute sizes of a call from the call's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ort_zero.compat.torch_graphs import expression_of

Symbols = tuple[int, ...]
"""The values of a graph's symbols in one call."""


def value_of(node: Any) -> Any:
    """Return the fake tensor, or the symbolic number, that stands for a node's value; a constant itself."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def axes_of(fake: torch.Tensor, names: dict[Any, str]) -> dict[int, str]:
    """Return a name for each size of a tensor that changes, by dimension; equal expressions have one name.

    Args:
        fake: the fake tensor.
        names: the names of expressions so far; new expressions are added.
    """
    return {
        dim: names.setdefault(expression_of(size), f"size_{len(names)}")  # type: ignore[arg-type]
        for dim, size in enumerate(fake.shape)
        if isinstance(size, torch.SymInt)
    }


class SizeReader:
    """Computes sizes of a call from the call's arguments.

    Args:
        fakes: the fake tensors and symbolic numbers of the arguments.
    """

    def __init__(self, fakes: Sequence[Any]):
        self._sources: dict[Any, tuple[int, int | None]] = {}
        for place, fake in enumerate(fakes):
            if isinstance(fake, torch.SymInt):
                self._sources.setdefault(expression_of(fake), (place, None))
            elif isinstance(fake, torch.Tensor):
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self._sources.setdefault(expression_of(size), (place, dim))
        self._sources = {symbol: source for symbol, source in self._sources.items() if symbol.is_Symbol}

    def symbols(self, arguments: Sequence[Any]) -> Symbols:
        """Return the values of the symbols in a call."""
        return tuple(
            int(arguments[place]) if dim is None else arguments[place].shape[dim]
            for place, dim in self._sources.values()
        )

    def evaluate(self, value: Any, symbols: Symbols) -> Any:
        """Return a symbolic number as a number, and anything else unchanged."""
        if not isinstance(value, torch.SymInt):
            return value
        return int(expression_of(value).xreplace(dict(zip(self._sources, symbols, strict=True))))

    def knows(self, value: Any) -> bool:
        """Return True if a number follows from the graph's inputs, so that :meth:`evaluate` can compute it."""
        return not isinstance(value, torch.SymInt) or expression_of(value).free_symbols <= self._sources.keys()
