"""How long a node takes, roughly: enough to tell a cheap recomputation from a dear one.

The figures are nanoseconds of one x86 core with onnxruntime-training 1.19.2; only their ratios matter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_zero.ortmodule.recompute.graph_model import GraphModel, Node

_PRODUCTS = frozenset(("MatMul", "FusedMatMul", "Gemm", "Einsum", "Conv"))
_PER_OPERATION = 0.014
"""Nanoseconds of one multiplication with its addition in a matrix product."""
_PER_ELEMENT = {
    "Dropout": 8.0, "DropoutGrad": 1.4, "IsNaN": 0.8, "BitmaskDropout": 8.0, "BiasDropout": 9.0, "Where": 6.5,
    "Softmax": 2.0, "BiasSoftmax": 2.5,
    "FastGelu": 1.8, "BiasGelu": 2.5, "Gelu": 2.5, "QuickGelu": 2.0, "LayerNormalization": 2.3,
    "SimplifiedLayerNormalization": 2.0, "SkipLayerNormalization": 2.8, "Transpose": 2.0, "Split": 1.0,
    "ConcatTraining": 1.0, "Gather": 1.0, "Sin": 8.0, "Cos": 8.0, "CumSum": 2.0, "BatchNormalization": 2.5,
    "Reshape": 0.0, "Squeeze": 0.0, "Unsqueeze": 0.0, "Flatten": 0.0, "Identity": 0.0,
}  # fmt: skip
_PER_ELEMENT_OF_OTHERS = 1.4
_PER_NODE = 5_000.0


def seconds_of(graph: GraphModel, node: Node) -> float:
    """Return the estimated seconds that one node takes in a step."""
    shape = graph.shapes.get(node.makes[0], ()) if node.makes else ()
    elements = math.prod(shape)
    if node.operator in _PRODUCTS:
        return 1e-9 * (_PER_NODE + _PER_OPERATION * elements * _inner(graph, node, elements))
    return 1e-9 * (_PER_NODE + _PER_ELEMENT.get(node.operator, _PER_ELEMENT_OF_OTHERS) * elements)


def _inner(graph: GraphModel, node: Node, elements: int) -> float:
    """Return the size of the axis that a product sums over: k of (b m k)(b k n) or (m k)(k n)."""
    one, two = ([*map(graph.shapes.get, node.reads[:2]), None, None])[:2]
    if not one or not two or not elements:
        return 1.0
    return max(1.0, (math.prod(one) * math.prod(two) / elements / math.prod(two[:-2])) ** 0.5)
