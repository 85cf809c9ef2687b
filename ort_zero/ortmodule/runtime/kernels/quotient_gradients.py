"""Gives the gradient of a quotient by operators that a tensor without elements may go through."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from ort_zero.ortmodule.compat.broadcast_operators import SUM_TO_SIZES
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node, replace_field


def divide_gradients(model: onnx.ModelProto) -> int:
    """Replace each DivGrad by the operators that it stands for, in place; return how many there were.

    ORT (1.19.2, ``training_ops/cpu/function_ops``: a function of ONNX) sums the gradients over axes that it finds when
    it runs, and sums a gradient without elements over all of them: a batch, or what a mask has selected, may be empty.
    """
    values = GraphValues(model, "ort_zero_div_grad")
    nodes: list[onnx.NodeProto] = []
    replaced = 0
    for node in model.graph.node:
        if node.op_type != "DivGrad":
            nodes.append(node)
            continue
        gradient, dividend, divisor = node.input
        name = f"ort_zero_div_grad_of_{node.name or replaced}"
        replaced += 1
        results = [*node.output, ""][:2]
        if results[0]:
            nodes.append(helper.make_node("Div", [gradient, divisor], [f"{name}/dividend"], f"{name}/dividend"))
            nodes += _summed(values, gradient, f"{name}/dividend", dividend, results[0])
        if results[1]:
            parts = [f"{name}/{part}" for part in ("quotient", "again", "negative", "divisor")]
            nodes.append(helper.make_node("Div", [dividend, divisor], parts[:1], parts[0]))
            nodes.append(helper.make_node("Div", [parts[0], divisor], parts[1:2], parts[1]))
            nodes.append(helper.make_node("Neg", [gradient], parts[2:3], parts[2]))
            nodes.append(helper.make_node("Mul", [parts[2], parts[1]], parts[3:], parts[3]))
            nodes += _summed(values, gradient, parts[3], divisor, results[1])
    if replaced:
        replace_field(model.graph, "node", nodes)
    return replaced


def _summed(values: GraphValues, alike: str, source: str, target: str, result: str) -> list[onnx.NodeProto]:
    """Return nodes that sum `source`, of the shape of `alike`, to the sizes of `target`; they give `result`."""
    shape, wanted = values.shape(alike), values.shape(target)
    if shape is None or wanted is None or "" in (*shape, *wanted) or len(wanted) > len(shape):
        return _summed_when_it_runs(source, target, result)
    leading = len(shape) - len(wanted)
    pairs = list(zip(shape[leading:], wanted, strict=True))
    if any(a not in (b, 1) and b != 1 for a, b in pairs) or any(a == 1 != b for a, b in pairs):
        return _summed_when_it_runs(source, target, result)
    sums = [(list(range(leading)), 0), ([i for i, (a, b) in enumerate(pairs) if a != b], 1)]
    nodes: list[onnx.NodeProto] = []
    for axes, kept in sums:
        if axes:
            name = f"{result}/sum_{len(nodes)}"
            given = [source, values.add_constant(axes, np.int64)]
            nodes.append(helper.make_node("ReduceSum", given, [name], name, keepdims=kept))
            source = name
    nodes.append(helper.make_node("Identity", [source], [result], f"{result}/summed"))
    return nodes


def _summed_when_it_runs(source: str, target: str, result: str) -> list[onnx.NodeProto]:
    sizes = f"{result}/sizes"
    return [
        helper.make_node("Shape", [target], [sizes], sizes),
        aten_node(SUM_TO_SIZES, [source, sizes], [result], f"{result}/summed"),
    ]
