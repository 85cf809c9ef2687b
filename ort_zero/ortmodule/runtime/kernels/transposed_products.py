"""Lets the gradients of weights be computed as they are wanted, where ORT computes their transposes first."""

from __future__ import annotations

import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes, swaps_two_dimensions
from ort_zero.ortmodule.onnx_edit.node_edits import replace_field, with_values


def compute_transposed(model: onnx.ModelProto) -> int:
    """Let a Gemm give the transpose of its result where that is all that is done with it; return how many there are.

    Changes `model`. The gradient of the weight of ``x @ weight.t()`` is that of the transposed weight, transposed:
    (A^T B)^T = B^T A.
    """
    values = GraphValues(model, "ort_zero_transposed")
    changed: dict[int, onnx.NodeProto] = {}
    left_out: set[int] = set()
    for node in model.graph.node:
        given = attributes(node)
        if (node.domain, node.op_type) != ("", "Gemm") or not given.get("transA") or given.get("transB"):
            continue
        transpose = values.sole_reader(node.output[0])
        if len([name for name in node.input if name]) != 2 or transpose is None or not swaps_two_dimensions(transpose):
            continue
        changed[id(node)] = with_values(node, list(reversed(node.input[:2])), list(transpose.output))
        left_out.add(id(transpose))
    if changed:
        nodes = [changed.get(id(node), node) for node in model.graph.node if id(node) not in left_out]
        replace_field(model.graph, "node", nodes)
    return len(changed)
