"""Read the example values that Dynamo stores in the nodes of its graphs: shapes, dtypes, symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_zero.compat.torch_graphs import expression_of


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
