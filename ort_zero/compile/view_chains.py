"""Shorten chains of views in a graph, each of which is a call from Python and some microseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ort_zero.compat.deferred_tensor import VIEWS as RESHAPES

_PERMUTE = torch.ops.aten.permute.default


def shorten(graph: Graph) -> None:
    """Have each view of a view read what the first one reads, and remove permutations that undo each other.

    The gradient of a weight is transposed twice in the graphs of AOTAutograd.
    """
    for node in list(graph.nodes):
        source = node.args[0] if node.target in RESHAPES or node.target is _PERMUTE else None
        if not isinstance(source, Node):
            continue
        if node.target in RESHAPES and source.target in RESHAPES:
            node.args = (source.args[0], *node.args[1:])
        elif node.target is _PERMUTE and source.target is _PERMUTE:
            _join(node, source)
        if not source.users:
            graph.erase_node(source)


def _arguments(node: Node) -> Any:
    return node.args


def _join(node: Node, source: Node) -> None:
    """Make one permutation of two; uses of a permutation that changes nothing read the first one's source."""
    (root, first), (_, second) = _arguments(source), _arguments(node)
    order = [first[dim] % len(first) for dim in second]
    node.args = (root, order)
    # an input of the graph must not become a result of it
    if order == sorted(order) and isinstance(root, Node) and root.op == "call_function":
        node.replace_all_uses_with(root)
        node.graph.erase_node(node)
