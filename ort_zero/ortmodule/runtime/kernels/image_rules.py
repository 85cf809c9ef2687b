"""Rules for the nodes of image models: convolutions and batch norms."""

from __future__ import annotations

import numpy as np
import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import attributes
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node
from ort_zero.ortmodule.runtime.kernels.edited_graph import FLOAT, EditedGraph, own_node
from ort_zero.ortmodule.runtime.operators import aten_op

_CHANNELS = 16
"""Input channels from which PyTorch's library computes the gradient of the input faster."""
_TERMS = 144
"""Products in a sum (channels times size of the kernel) from which it computes a convolution faster."""


def convolution(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a convolution that PyTorch's library computes faster."""
    settings = _convolution_settings(graph, node, node.input[1])
    if settings is None or not graph.all_float([name for name in node.input if name]):
        return None
    stride, padding, dilation, groups = settings
    no = graph.values.add_constant(False, np.bool_)
    zeros = graph.values.add_constant([0, 0], np.int64)
    bias = node.input[2] if len(node.input) > 2 else ""
    inputs = [*node.input[:2], bias, stride, padding, dilation, no, zeros, groups]
    return aten_node("convolution", inputs, list(node.output), node.name)


def convolution_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradients of a convolution."""
    settings = _convolution_settings(graph, node, node.input[2])
    shape = graph.values.shape(node.input[2])
    if settings is None or shape is None or not graph.all_float(node.input):
        return None
    if node.output[0] and int(shape[1]) < _CHANNELS:
        return None
    outputs = [*node.output, "", ""][:3]
    wanted = graph.values.add_constant([bool(name) for name in outputs], np.bool_)
    for i, name in enumerate(outputs):
        if not name:
            outputs[i] = f"{next(filter(None, outputs))}/ort_zero_unwanted_{i}"
            graph.values.declare(outputs[i], FLOAT, [0])
    return own_node("convolution_backward", [*node.input, *settings, wanted], node, outputs)


def _convolution_settings(graph: EditedGraph, node: onnx.NodeProto, weight: str) -> tuple[str, ...] | None:
    """Return stride, padding, dilation and groups as constants; None for what PyTorch's library does not do faster."""
    given, shape = attributes(node), graph.values.shape(weight)
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return None
    pads = list(given.get("pads", [0] * 4))
    channels, height, width = (int(size) for size in shape[1:])
    if given.get("auto_pad", b"NOTSET") != b"NOTSET" or pads[:2] != pads[2:]:
        return None
    if min(height, width) < 2 or channels * height * width < _TERMS:
        return None
    lists = (given.get("strides", [1, 1]), pads[:2], given.get("dilations", [1, 1]), given.get("group", 1))
    return tuple(graph.values.add_constant(value, np.int64) for value in lists)


def batch_norm(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a node that runs a batch norm in PyTorch; the node of its gradient follows."""
    operator = aten_op.operator_named(attributes(node).get("func_name", b"").decode())
    settings = _batch_norm_settings(operator)
    values = graph.values
    if settings is None or len(node.input) != 5 or not all(node.input) or not graph.all_float(node.input):
        return None
    context, result = node.output
    gradients = values.readers.get(context, [])
    if context in values.outputs or len(gradients) != 1 or gradients[0].op_type != "PythonOpGrad":
        return None
    gradient = gradients[0]
    if len(gradient.input) != 2 or any(gradient.output[3:]) or not values.readers.get(result):
        return None
    # with a number of its own, no two nodes are the same expression, which ORT would compute once
    constant = values.add_constant([*settings, len(graph.norms)], np.float64)
    saved = [f"{result}/ort_zero_{name}" for name in ("mean", "inverse")]
    for name in saved:
        values.declare(name, FLOAT, values.shape(node.input[1]))
    graph.norms[context] = [node.input[0], node.input[1], *saved, constant]
    return own_node("batch_norm", [*node.input, constant], node, [result, *saved])


def batch_norm_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace the gradient of a batch norm that :func:`batch_norm` has replaced."""
    inputs = graph.norms.get(node.input[0])
    if inputs is None:
        return None
    outputs = list(node.output[:3])
    for i, like in enumerate((inputs[0], inputs[1], inputs[1])):
        if not outputs[i]:
            outputs[i] = f"{inputs[2]}_unwanted_{i}"
            graph.values.declare(outputs[i], FLOAT, graph.values.shape(like))
    return own_node("batch_norm_backward", [node.input[1], *inputs], node, outputs)


def _batch_norm_settings(operator: aten_op.Operator | None) -> tuple[float, float] | None:
    """Return momentum and epsilon of a batch norm that computes the statistics of its batch; None for another one."""
    if operator is None or operator.name != "aten::batch_norm" or len(operator.arguments) != 9:
        return None
    tensors = [argument for _, argument in operator.arguments[:5]]
    numbers = [argument.value for _, argument in operator.arguments[5:8] if isinstance(argument, aten_op.Constant)]
    if tensors != [aten_op.Tensor(i) for i in range(5)] or len(numbers) != 3 or numbers[0] is not True:
        return None
    momentum, epsilon = numbers[1:]
    return (float(momentum), float(epsilon)) if isinstance(momentum, float) and isinstance(epsilon, float) else None
