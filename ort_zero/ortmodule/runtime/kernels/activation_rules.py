"""Rules for activations, their gradients, and norms of the last dimension."""

from __future__ import annotations

import numpy as np
import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import attributes
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node
from ort_zero.ortmodule.runtime.kernels.edited_graph import FLOAT, EditedGraph, own_node

_WIDE = 512
"""Elements in a row from which the gradient of a norm by the root of the mean square is faster in blocks of rows."""


def gelu(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a GELU, with or without a bias that is added first."""
    inputs = [name for name in node.input if name]
    if not graph.all_float(inputs) or attributes(node).get("approximate", b"none") != b"none":
        return None
    if len(inputs) == 2:
        return own_node("bias_gelu", inputs, node)
    return aten_node("gelu", [*inputs, ""], list(node.output), node.name)


def gelu_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradient of a GELU."""
    inputs = [name for name in node.input if name]
    if not graph.all_float(inputs):
        return None
    if node.op_type == "GeluGrad":
        return aten_node("gelu_backward", [*inputs, ""], list(node.output), node.name)
    if node.op_type == "BiasGeluGrad_dX":
        return own_node("bias_gelu_backward", inputs, node)
    return own_node("gelu_tanh_backward" if len(inputs) == 2 else "bias_gelu_tanh_backward", inputs, node)


def relu_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradient of a ReLU."""
    return own_node("relu_backward", list(node.input), node) if graph.all_float(node.input) else None


def layer_norm(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a layer norm that gives its statistics, for the gradient, too."""
    inputs = [name for name in node.input if name]
    if len(inputs) != 3 or len(node.output) != 3 or not all(node.output):
        return None
    if attributes(node).get("stash_type", FLOAT) != FLOAT or not _width(graph, node, *inputs[:2]):
        return None
    epsilon = graph.values.add_constant([attributes(node).get("epsilon", 1e-5)], np.float64)
    _declare_statistics(graph, node)
    return own_node("layer_norm", [*inputs, epsilon], node)


def layer_norm_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradients of a layer norm."""
    grad, x, scale, mean, deviation = node.input
    width = _width(graph, node, x, scale)
    if not all(node.output) or not graph.all_float([grad]) or not width:
        return None
    sizes = graph.values.add_constant([width], np.int64)
    wanted = graph.values.add_constant([True, True, True], np.bool_)
    inputs = [grad, x, sizes, mean, deviation, scale, scale, wanted]
    return aten_node("native_layer_norm_backward", inputs, list(node.output), node.name)


def rms_norm(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a norm by the root of the mean square that gives its statistic, for the gradient, too."""
    if len(node.input) != 2 or len(node.output) != 2 or not all(node.output):
        return None
    if attributes(node).get("stash_type", FLOAT) != FLOAT or not _width(graph, node, *node.input):
        return None
    epsilon = graph.values.add_constant([attributes(node).get("epsilon", 1e-5)], np.float64)
    _declare_statistics(graph, node)
    return own_node("rms_norm", [*node.input, epsilon], node)


def rms_norm_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradients of such a norm."""
    grad, x, scale, _ = node.input
    if len(node.output) != 2 or not all(node.output) or not graph.all_float([grad]):
        return None
    return own_node("rms_norm_backward", list(node.input), node) if _width(graph, node, x, scale) >= _WIDE else None


def _declare_statistics(graph: EditedGraph, node: onnx.NodeProto) -> None:
    """Give the statistics of a norm types where ORT's fusion has given them none."""
    for name in node.output[1:]:
        if not graph.values.element_type(name):
            graph.values.declare(name, FLOAT, None)


def _width(graph: EditedGraph, node: onnx.NodeProto, x: str, scale: str) -> int:
    """Return the size of the last dimension for a norm of float32 over that one alone; 0 for others, or if unknown."""
    shape, rank = graph.values.shape(scale), len(graph.values.shape(x) or ())
    if not graph.all_float((x, scale)) or not rank or attributes(node).get("axis", -1) not in (-1, rank - 1):
        return 0
    return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else 0
