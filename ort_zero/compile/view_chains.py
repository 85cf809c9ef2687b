"""Shorten chains of views in a graph, each of which is a call from Python and some microseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ort_zero.compat.deferred_tensor import VIEWS as RESHAPES

_PERMUTE = torch.ops.aten.permute.default


def shorten(graph: Graph) -> None:
    """Merge each ``view`` of a ``view``, and each ``permute`` of a ``permute``, into one; remove pairs that do nothing.

    AOTAutograd's graphs transpose the gradient of each weight twice.
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


def _join(node: Any, source: Any) -> None:
    """Merge two ``permute`` nodes of which `node` reads `source`; if the two undo each other, remove both."""
    (root, first), (_, second) = source.args, node.args
    order = [first[dim] % len(first) for dim in second]
    node.args = (root, order)
    # an input of the graph must not become a result of it
    if order == sorted(order) and isinstance(root, Node) and root.op == "call_function":
        node.replace_all_uses_with(root)
        node.graph.erase_node(node)
