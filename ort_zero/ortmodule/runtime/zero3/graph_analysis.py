"""Classifies the nodes and values of a training graph: their level, their phase, and what they are computed from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from ort_zero.ortmodule.onnx_edit.topology import input_names, is_random, node_key, output_names, topological_order

OPAQUE_OPERATORS = frozenset(("YieldOp", "PythonOp", "PythonOpGrad"))
"""Operators whose outputs never count as computed from weights only: what they do is not known, or happens once."""


@dataclass(frozen=True, slots=True)
class GraphAnalysis:
    """Facts about each node and value of a graph, found before anything is decided."""

    order: list[onnx.NodeProto]
    """The nodes in a topological order."""
    node_level: dict[str, int]
    """Level of each node by its :func:`~.onnx_edit.topology.node_key`: the number of nodes on the longest path
    from the graph's inputs."""
    value_level: dict[str, int]
    """Level of the node that produces the value; graph inputs and initializers are missing (level 0)."""
    backward: set[str]
    """Names of the values that exist only after the forward's outputs were handed to the user."""
    constant: set[str]
    """Values that are the same in each run: initializers, shapes of weights, and what is computed from such values."""
    source_weights: dict[str, frozenset[str]]
    """For each value that is computed from weights and constants only, those weights; a weight's are itself."""

    def is_weight_only(self, node: onnx.NodeProto) -> bool:
        """Return whether `node` computes something from weights and constants only, such as a weight's transpose."""
        return any(name in self.source_weights for name in output_names(node))

    def weights_read_by(self, node: onnx.NodeProto) -> set[str]:
        """Return the weights that `node` reads, themselves or through what is computed from them only."""
        return {weight for name in input_names(node) for weight in self.source_weights.get(name, ())}


def analyse(graph: onnx.GraphProto, weights: Collection[str]) -> GraphAnalysis:
    """Return the analysis of `graph`, in which the inputs named `weights` are weights.

    Raises:
        GraphEditError: the graph has a cycle, or a node reads a value that nothing makes.
    """
    order = topological_order(graph)
    node_level: dict[str, int] = {}
    value_level: dict[str, int] = {}
    backward: set[str] = set()
    constant = {i.name for i in graph.initializer}
    inputs = {i.name for i in graph.input}
    source_weights = {name: frozenset((name,)) for name in weights if name in inputs}
    for node in order:
        read, produced = input_names(node), output_names(node)
        level = 1 + max((value_level.get(name, 0) for name in read), default=0)
        node_level[node_key(node)] = level
        value_level.update(dict.fromkeys(produced, level))
        if node.op_type == "YieldOp" or any(name in backward for name in read):
            backward.update(produced)
        if node.op_type in OPAQUE_OPERATORS or is_random(node):
            continue
        if node.op_type in ("Shape", "Size") and node.input[0] in source_weights:
            constant.update(produced)
        elif all(name in constant for name in read) and (read or node.op_type == "Constant"):
            constant.update(produced)
        elif any(name in source_weights for name in read) and all(
            name in constant or name in source_weights for name in read
        ):
            sources = frozenset().union(*(source_weights[name] for name in read if name in source_weights))
            source_weights.update(dict.fromkeys(produced, sources))
    return GraphAnalysis(order, node_level, value_level, backward, constant, source_weights)
