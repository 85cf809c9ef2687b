"""Puts the kernels of :mod:`ort_zero.ortmodule.runtime.kernels.table` into a gradient graph that ORT has built.

An entry replaces a node, in place, only where all that it has to know of the node is known; the results keep their
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx

from ort_zero.ortmodule.compat.ort_kernels import BARRIER
from ort_zero.ortmodule.compat.ortmodule import GraphInfo
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import replace_field
from ort_zero.ortmodule.runtime.kernels import activation_rules, image_rules, operators, product_rules
from ort_zero.ortmodule.runtime.kernels.edited_graph import FLOAT, EditedGraph, Loss, own_node


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
        for name, rule in _RULES_OF.get((node.domain, node.op_type), ()):
            new = rule(graph, node) if name in entries else None
            if new is not None:
                graph.replaced[name] += 1
                nodes.append(new)
                break
        else:
            nodes.append(node)
    nodes = [node for node in nodes if id(node) not in graph.left_out]
    for node in nodes:
        for i, name in enumerate(node.input):
            if name in graph.renamed:
                node.input[i] = graph.renamed[name]
    if graph.replaced:
        operators.register()
        replace_field(model.graph, "node", nodes)
    return graph.info, graph.replaced


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
_RULES: tuple[tuple[str, _Rule, tuple[tuple[str, str], ...]], ...] = (
    ("gelu", activation_rules.gelu, ((_MS, "BiasGelu"), (_MS, "Gelu"), ("", "Gelu"))),
    (
        "gelu_gradient",
        activation_rules.gelu_gradient,
        tuple((_MS, name) for name in ("FastGeluGrad", "GeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX")),
    ),
    ("layer_norm", activation_rules.layer_norm, (("", "LayerNormalization"),)),
    ("layer_norm_gradient", activation_rules.layer_norm_gradient, ((_MS, "LayerNormalizationGrad"),)),
    ("rms_norm", activation_rules.rms_norm, (("", "SimplifiedLayerNormalization"),)),
    ("rms_norm_gradient", activation_rules.rms_norm_gradient, ((_MS, "SimplifiedLayerNormalizationGrad"),)),
    ("relu_gradient", activation_rules.relu_gradient, ((_MS, "ReluGrad"),)),
    ("convolution", image_rules.convolution, (("", "Conv"),)),
    ("convolution", image_rules.convolution_gradient, ((_MS, "ConvGrad"),)),
    ("batch_norm", image_rules.batch_norm, ((_MS, "PythonOp"),)),
    ("batch_norm", image_rules.batch_norm_gradient, ((_MS, "PythonOpGrad"),)),
    ("long_product", product_rules.long_product, (("", "MatMul"), (_MS, "FusedMatMul"), ("", "Gemm"))),
    ("weight_gradient", product_rules.weight_gradient, (("", "Gemm"),)),
    ("cross_entropy", _cross_entropy, ((_MS, "SoftmaxCrossEntropyLossInternal"),)),
    ("cross_entropy", _cross_entropy_gradient, (_LOSS_GRADIENT,)),
)
"""Name of the entry, the function that returns the node in place of one, or None, and the operators (with their
domains) for which it is asked, in this order."""
_RULES_OF = {
    operator: [(name, rule) for name, rule, operators in _RULES if operator in operators]
    for _, _, taken in _RULES
    for operator in taken
}
"""Names and functions by domain and operator."""
