"""Puts the kernels of :mod:`ort_zero.runtime.kernels.table` into a gradient graph that ORT has built.

An entry replaces a node, in place, only where all that it has to know of the node is known; the results keep their
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx

from ort_zero.compat.ort_kernels import BARRIER
from ort_zero.compat.ortmodule import GraphInfo
from ort_zero.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.onnx_edit.node_edits import aten_node, replace_field
from ort_zero.runtime.kernels import image_rules, operators
from ort_zero.runtime.kernels.edited_graph import FLOAT, EditedGraph, Loss, own_node


def replace_kernels(model: onnx.ModelProto, info: GraphInfo, entries: frozenset[str]) -> tuple[GraphInfo, Counter[str]]:
    """Replace nodes of `model` in place.

    Args:
        model: a gradient graph for the CPU.
        info: what ORT's graph builder knows of it.
        entries: names of the entries of the table that may be used.

    Returns:
        What is to be known of the graph now, and how many nodes each entry has replaced.
    """
    graph = EditedGraph(GraphValues(model, "ort_zero_kernels"), info)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if id(node) in graph.left_out:
            continue
        name, rule = _RULES.get((node.domain, node.op_type), ("", None))
        new = rule(graph, node) if rule is not None and name in entries else None
        if new is None:
            nodes.append(node)
        else:
            graph.replaced[name] += 1
            nodes.append(new)
    nodes = [node for node in nodes if id(node) not in graph.left_out]
    for node in nodes:
        for i, name in enumerate(node.input):
            if name in graph.renamed:
                node.input[i] = graph.renamed[name]
    if graph.replaced:
        operators.register()
        replace_field(model.graph, "node", nodes)
    return graph.info, graph.replaced


# -- gradients of activations and norms --------------------------------------------------------------------------------


def _gelu_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    inputs = [name for name in node.input if name]
    if not graph.all_float(inputs):
        return None
    if node.op_type == "GeluGrad":
        return aten_node("gelu_backward", [*inputs, ""], list(node.output), node.name)
    if node.op_type == "BiasGeluGrad_dX":
        return own_node("bias_gelu_backward", inputs, node)
    return own_node("gelu_tanh_backward" if len(inputs) == 2 else "bias_gelu_tanh_backward", inputs, node)


def _layer_norm_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    grad, x, scale, mean, deviation = node.input
    shape, rank = graph.values.shape(scale), len(graph.values.shape(x) or ())
    axis = attributes(node).get("axis", -1)
    if not graph.all_float((grad, x, scale)) or not rank or axis not in (-1, rank - 1) or not all(node.output):
        return None
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
        return None
    sizes = graph.values.add_constant(shape, np.int64)
    wanted = graph.values.add_constant([True, True, True], np.bool_)
    inputs = [grad, x, sizes, mean, deviation, scale, scale, wanted]
    return aten_node("native_layer_norm_backward", inputs, list(node.output), node.name)


def _relu_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    if not graph.all_float(node.input):
        return None
    return own_node("relu_backward", list(node.input), node)


# -- gradients of weights ----------------------------------------------------------------------------------------------


def _weight_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    given = attributes(node)
    inputs = [name for name in node.input if name]
    plain = given.get("transA") and not given.get("transB") and given.get("alpha", 1.0) == 1.0
    if not plain or len(inputs) != 2 or not graph.all_float(inputs):
        return None
    rows = graph.values.add_constant([0], np.int64)
    transpose = graph.values.sole_reader(node.output[0])
    if transpose is not None and transpose.op_type == "Transpose" and _swaps_two(transpose):
        graph.left_out.add(id(transpose))
        return aten_node("tensordot", [*reversed(inputs), rows, rows], list(transpose.output), node.name)
    return aten_node("tensordot", [*inputs, rows, rows], list(node.output), node.name)


def _swaps_two(node: onnx.NodeProto) -> bool:
    return list(attributes(node).get("perm", [1, 0])) == [1, 0]


# -- cross entropy -----------------------------------------------------------------------------------------------------


def _cross_entropy(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    values = graph.values
    logits, labels, weights, ignore = (*node.input, "", "")[:4]
    log_probabilities = node.output[1] if len(node.output) > 1 else ""
    reduction = attributes(node).get("reduction", b"mean")
    readers = values.readers.get(log_probabilities, [])
    if (
        weights
        or reduction not in (b"mean", b"sum")
        or not graph.all_float([logits])
        or len(values.shape(logits) or ()) != 2
        or not log_probabilities
        or log_probabilities in values.outputs
        or any((reader.domain, reader.op_type) != _LOSS_GRADIENT or reader.input[2] != labels for reader in readers)
    ):
        return None
    ignored = np.array(-100) if not ignore else values.constant(ignore)
    if ignored is None:
        return None
    label = values.add_constant(int(ignored), np.int64)
    scale = f"{log_probabilities}/ort_zero_scale"
    values.declare(scale, FLOAT, [])
    graph.losses[log_probabilities] = Loss(logits, labels, scale, label)
    mean = values.add_constant(reduction == b"mean", np.bool_)
    return own_node("cross_entropy", [logits, labels, label, mean], node, [node.output[0], scale])


def _cross_entropy_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    loss = graph.losses.get(node.input[1])
    if loss is None:
        return None
    other = node.input[5] if len(node.input) > 5 else ""
    if not other:
        other = _take_gradient_of_logits(graph, node.output[0])
    return own_node(
        "cross_entropy_backward", [node.input[0], loss.logits, loss.labels, loss.scale, other, loss.ignored], node
    )


def _take_gradient_of_logits(graph: EditedGraph, gradient: str) -> str:
    """Return the gradient that the caller gives for the logits, whose sum with `gradient` is left out.

    The kernel adds it where there is one: ORTModule need not fill a tensor of that size with zeros.

    Returns:
        Its name; "" if nothing like that is added.
    """
    values = graph.values
    reader, value = values.sole_reader(gradient), gradient
    if reader is not None and reader.op_type == "Reshape" and reader.input[0] == gradient:
        value = reader.output[0]
        reader = values.sole_reader(value)
    if reader is None or reader.op_type not in ("Sum", "Add") or len(reader.input) != 2:
        return ""
    others = [name for name in reader.input if name != value]
    if len(others) != 1 or reader.output[0] in values.outputs or values.sole_reader(others[0]) is None:
        return ""
    given, producer = others[0], values.producers.get(others[0])
    if producer is not None and producer.op_type == "Identity" and values.sole_reader(producer.input[0]) is not None:
        given, producer = producer.input[0], values.producers.get(producer.input[0])
    if producer is None or producer.op_type != BARRIER:
        return ""
    graph.left_out.add(id(reader))
    graph.renamed[reader.output[0]] = value
    _need_no_zeros(graph, list(producer.output).index(given))
    return given


def _need_no_zeros(graph: EditedGraph, position: int) -> None:
    """Note that the gradient at `position` among those that the caller gives may be one element for none."""
    info = graph.info
    plain = set(info.output_grad_indices_non_differentiable)
    differentiable = [i for i in range(len(info.user_output_names)) if i not in plain]
    full = [i for i in info.output_grad_indices_require_full_shape if i != differentiable[position]]
    graph.info = replace(info, output_grad_indices_require_full_shape=full)


_Rule = Callable[[EditedGraph, onnx.NodeProto], onnx.NodeProto | None]
_MS = "com.microsoft"
_LOSS_GRADIENT = (_MS, "SoftmaxCrossEntropyLossInternalGrad")
_RULES: dict[tuple[str, str], tuple[str, _Rule]] = {
    **{
        (_MS, operator): ("gelu_gradient", _gelu_gradient)
        for operator in ("FastGeluGrad", "GeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX")
    },
    (_MS, "LayerNormalizationGrad"): ("layer_norm_gradient", _layer_norm_gradient),
    (_MS, "ReluGrad"): ("relu_gradient", _relu_gradient),
    ("", "Conv"): ("convolution", image_rules.convolution),
    (_MS, "ConvGrad"): ("convolution", image_rules.convolution_gradient),
    (_MS, "PythonOp"): ("batch_norm", image_rules.batch_norm),
    (_MS, "PythonOpGrad"): ("batch_norm", image_rules.batch_norm_gradient),
    ("", "Gemm"): ("weight_gradient", _weight_gradient),
    (_MS, "SoftmaxCrossEntropyLossInternal"): ("cross_entropy", _cross_entropy),
    _LOSS_GRADIENT: ("cross_entropy", _cross_entropy_gradient),
}
"""By domain and operator: name of the entry, and the function that returns the node in place of one, or None."""
