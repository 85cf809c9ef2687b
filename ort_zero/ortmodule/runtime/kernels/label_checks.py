"""Looks at the labels of each cross entropy that ORT's kernel computes: it reads memory by them, whatever they are."""

from __future__ import annotations

import numpy as np
import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node, replace_field
from ort_zero.ortmodule.runtime.kernels import operators

_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal")


def check_labels(model: onnx.ModelProto) -> int:
    """Put a check before each loss of `model`, in place; return how many there are.

    Args:
        model: a graph for the CPU, whose own kernels are in it already: they look for themselves.
    """
    values = GraphValues(model, "ort_zero_labels")
    nodes: list[onnx.NodeProto] = []
    checks = 0
    for node in model.graph.node:
        ignored = _ignored(values, node) if node.op_type in _LOSSES else None
        if ignored is not None:
            logits, labels = node.input[:2]
            name, checks = f"{labels}/ort_zero_checked_{checks}", checks + 1
            values.declare(name, values.element_type(labels), values.shape(labels))
            label = values.add_constant(ignored, np.int64)
            operator = f"{operators.NAMESPACE}::checked_labels"
            nodes.append(aten_node(operator, [labels, logits, label], [name], name))
            node.input[1] = name
        nodes.append(node)
    if checks:
        operators.register()
        replace_field(model.graph, "node", nodes)
    return checks


def _ignored(values: GraphValues, loss: onnx.NodeProto) -> int | None:
    """Return the label of rows that have none; None if the graph computes it."""
    if len(loss.input) > 3 and loss.input[3]:
        constant = values.constant(loss.input[3])
        return None if constant is None else int(constant)
    return int(attributes(loss).get("ignore_index", -100))
