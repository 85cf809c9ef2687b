"""Finds a language-model head with its cross entropy in an exported model, and makes one node of both.

In place of the logits that the model returns, the graph returns what they are computed from: the head's input, its
weight and bias. They are copies, since the optimizer changes the weights, and ZeRO-3 gives their memory to others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from ort_zero.compat.ortmodule import GraphInfo
from ort_zero.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.onnx_edit.node_edits import ATEN_DOMAIN, aten_node, copied, replace_field
from ort_zero.runtime.fused_loss import operators

LARGE = 4096
"""Number of classes from which a head is large enough to be worth it."""
_FLOAT = onnx.TensorProto.FLOAT
_PREFIX = "ort_zero_fused_loss"
_LOSSES = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal")


@dataclass(frozen=True, slots=True)
class ReturnedLogits:
    """Where the results of a graph are from which the logits are computed that the model returns.

    Attributes:
        index: of the head's input, in the place of the logits.
        first: of the weight; the bias comes behind it.
        count: 1, or 2 with a bias.
    """

    index: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """What a fused node has changed; `returned` is None where the model does not return its logits."""

    returned: ReturnedLogits | None


@dataclass(frozen=True, slots=True)
class _Head:
    """A head and its loss in a graph."""

    loss: onnx.NodeProto
    hidden: str
    weight: str
    bias: str
    logits: str
    slices: tuple[onnx.NodeProto, ...]
    """What lies between logits and loss: each takes a part of the rows. In the order of the graph."""
    output: str
    """Name of the result of the graph that holds the logits; "" for none."""
    ignored: int
    mean: bool
    classes: int


def fuse_loss(
    model: onnx.ModelProto, trained: Collection[str], *, results: int, least_classes: int = LARGE
) -> FusedLoss | None:
    """Make one node of the head and its loss, in place; None if there is none that can be taken.

    Args:
        model: exported, with the shapes of its values.
        trained: names of the graph inputs whose gradient is wanted.
        results: number of outputs of the graph that are the model's; the others are read by the runtime.
        least_classes: smaller heads stay as they are.
    """
    values = GraphValues(model, _PREFIX)
    heads = [head for node in model.graph.node if (head := _head_of(values, node)) is not None]
    # of several heads each has rows and logits of its own
    if len(heads) != 1 or heads[0].classes < least_classes:
        return None
    head = heads[0]
    names = [output.name for output in model.graph.output]
    if head.output and names.index(head.output) >= results:
        return None
    operators.register()
    _insert(model, values, head, head.weight in trained)
    if not head.output:
        return FusedLoss(None)
    return FusedLoss(ReturnedLogits(names.index(head.output), len(names), 2 if head.bias else 1))


def without_zeros(info: GraphInfo, returned: ReturnedLogits) -> GraphInfo:
    """Return what is known of a gradient graph where no gradient of the copies need be filled with zeros."""
    copies = range(returned.first, returned.first + returned.count)
    full = [i for i in info.output_grad_indices_require_full_shape if i not in copies]
    return replace(info, output_grad_indices_require_full_shape=full)


def _insert(model: onnx.ModelProto, values: GraphValues, head: _Head, weight_gradient: bool) -> None:
    """Replace loss, slices and head by one node; what nothing reads any more goes too."""
    graph, new = model.graph, []
    hidden = head.hidden
    for i, node in enumerate(head.slices):
        part = copied(node)
        part.input[0], part.output[0] = hidden, f"{_PREFIX}_part_{i}"
        shape = values.shape(node.output[0])
        width = (values.shape(head.hidden) or [""])[-1]
        values.declare(part.output[0], _FLOAT, [*shape[:-1], width] if shape else None)
        hidden = part.output[0]
        new.append(part)
    constants = [
        values.add_constant(head.ignored, np.int64),
        values.add_constant(head.mean, np.bool_),
        values.add_constant(weight_gradient, np.bool_),
    ]
    layer = [name for name in (head.weight, head.bias) if name]
    results = [head.loss.output[0], *(f"{_PREFIX}_gradient_{i}" for i in range(3 if head.bias else 2))]
    for name, like in zip(results[1:], (hidden, *layer), strict=True):
        values.declare(name, _FLOAT, values.shape(like))
    copies = [f"{_PREFIX}_{name}" for name in ("weight", "bias")[: len(layer)]] if head.output else []
    operator = operators.name_of(bias=bool(head.bias), copies=bool(copies))
    made = [f"{name}_copy" for name in copies]
    for name, like in zip(made, layer, strict=False):
        values.declare(name, _FLOAT, values.shape(like))  # ORT knows the results of ATen nodes from here alone
    given = [hidden, *layer, head.loss.input[1], *constants]
    new.append(aten_node(operator, given, [*results, *made], f"{_PREFIX}_node"))
    if head.output:
        _return_parts(graph, values, head, dict(zip(copies, layer, strict=True)))
        states = f"{_PREFIX}_hidden_copy"  # ORT gives the memory of a result to others once the graph has read it
        values.declare(states, _FLOAT, values.shape(head.hidden))
        new.append(aten_node(operators.COPY, [head.hidden], [states], states))
        for name, result in ((states, f"{_PREFIX}_hidden"), *zip(made, copies, strict=True)):
            new.append(helper.make_node("Identity", [name], [result], result))
    gone = {id(node) for node in head.slices}
    nodes = []
    for one in graph.node:
        if one is head.loss:
            nodes += new
        elif id(one) not in gone and not (head.output and head.output in one.output):
            nodes.append(one)
    replace_field(graph, "node", _without_unread(nodes, {output.name for output in graph.output}))
    named = {name for one in graph.node for name in one.output}
    replace_field(graph, "value_info", [value for value in graph.value_info if value.name in named])
    if not any(opset.domain == ATEN_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ATEN_DOMAIN, 1))


def _return_parts(graph: onnx.GraphProto, values: GraphValues, head: _Head, copies: dict[str, str]) -> None:
    """Let the graph return the head's input in place of the logits, and the copies at the end."""
    outputs = list(graph.output)
    at = next(i for i, output in enumerate(outputs) if output.name == head.output)
    shape = values.shape(head.hidden)
    outputs[at] = helper.make_tensor_value_info(f"{_PREFIX}_hidden", _FLOAT, shape)
    for name, like in copies.items():
        outputs.append(helper.make_tensor_value_info(name, _FLOAT, values.shape(like)))
    replace_field(graph, "output", outputs)


def _without_unread(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Leave out what made the logits, and whatever was there for it alone."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        pure = node.op_type in ("MatMul", "Gemm", "Add", "Reshape", "Transpose", "Constant", "Identity", "Slice",
                                "Shape", "Gather", "Unsqueeze", "Concat")  # fmt: skip
        if pure and not node.domain and not needed.intersection(node.output):
            continue
        needed.update(node.input)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                needed.update(name for inner in body.node for name in inner.input)
        kept.append(node)
    return kept[::-1]


# -- finding -----------------------------------------------------------------------------------------------------------


def _head_of(values: GraphValues, loss: onnx.NodeProto) -> _Head | None:
    """Return the head whose logits the node `loss` reads; None if it is no such loss or computes something else too."""
    if loss.op_type not in _LOSSES or len(loss.input) < 2 or (len(loss.input) > 2 and loss.input[2]):
        return None
    given = attributes(loss)
    reduction = given.get("reduction", b"mean")
    if reduction not in (b"mean", b"sum") or any(values.readers.get(name) for name in loss.output[1:]):
        return None
    if any(name in values.outputs for name in loss.output[1:]):
        return None
    ignored: int | None = -100
    if len(loss.input) > 3 and loss.input[3]:
        constant = values.constant(loss.input[3])
        ignored = None if constant is None else int(constant)
    ignored = given.get("ignore_index", ignored)
    shape = values.shape(loss.input[0])
    if ignored is None or shape is None or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
        return None
    found = _between(values, loss, shape[1])
    if found is None:
        return None
    logits, slices = found
    output = _returned(values, logits, (*slices, loss))
    layer = _layer(values, logits, shape[1])
    if output is None or layer is None:
        return None
    return _Head(loss, *layer, logits, slices, output, ignored, reduction == b"mean", shape[1])


def _between(values: GraphValues, loss: onnx.NodeProto, classes: int) -> tuple[str, tuple[onnx.NodeProto, ...]] | None:
    """Return the logits behind the operand of a loss, and the nodes that take a part of their rows."""
    name = loss.input[0]
    slices: list[onnx.NodeProto] = []
    while True:
        node = values.producers.get(name)
        if node is None or node.domain or name in values.outputs:
            return None
        if node.op_type in ("MatMul", "Gemm", "Add"):
            return name, tuple(reversed(slices))
        shape = values.shape(node.input[0])
        if shape is None or not shape or shape[-1] != classes:
            return None
        if node.op_type == "Slice" and _takes_rows(values, node, len(shape)):
            slices.append(node)
        elif node.op_type not in ("Reshape", "Identity", "Flatten"):
            return None
        elif slices and node.op_type != "Identity":
            return None  # rows of another numbering
        # what else reads it would have to be computed
        if values.sole_reader(name) is None:
            return None
        name = node.input[0]


def _takes_rows(values: GraphValues, node: onnx.NodeProto, rank: int) -> bool:
    """Return whether a Slice leaves all classes."""
    if len(node.input) < 4 or not node.input[3]:
        return False
    name, producer = node.input[3], values.producers.get(node.input[3])
    if producer is not None and producer.op_type == "Unsqueeze":
        name = producer.input[0]  # as the exporter writes a list of one number
    axes = values.constant(name)
    return axes is not None and all(int(axis) % rank != rank - 1 for axis in axes.reshape(-1))


def _returned(values: GraphValues, logits: str, path: tuple[onnx.NodeProto, ...]) -> str | None:
    """Return the name of the result that holds the logits, "" for none; None if they are read elsewhere too."""
    if logits in values.outputs:
        return None
    output, to_loss = "", 0
    for reader in values.readers.get(logits, []):
        name = reader.output[0]
        if reader.op_type == "Identity" and name in values.outputs:
            if output or values.readers.get(name):
                return None
            output = name
        elif any(reader is one for one in path) or (
            reader.op_type in ("Reshape", "Identity", "Flatten") and values.sole_reader(name) is not None
        ):
            to_loss += 1
        else:
            return None
    return output if to_loss == 1 else None


def _layer(values: GraphValues, logits: str, classes: int) -> tuple[str, str, str] | None:
    """Return input, weight [classes, width] and bias ("" for none) of the linear layer that computes the logits."""
    node = values.producers[logits]
    bias = ""
    if node.op_type == "Add":
        for i, name in enumerate(node.input):
            product = values.producers.get(node.input[1 - i])
            if product is not None and product.op_type == "MatMul" and values.shape(name) == [classes]:
                bias, node = name, product
                break
        if not bias or values.sole_reader(node.output[0]) is None:
            return None
    if node.op_type == "Gemm":
        given = attributes(node)
        plain = given.get("transB") and not given.get("transA")
        if not plain or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return None
        weight, bias = node.input[1], node.input[2] if len(node.input) > 2 else ""
    elif node.op_type == "MatMul":
        transpose = values.producers.get(node.input[1])
        if transpose is None or transpose.op_type != "Transpose" or attributes(transpose).get("perm") != [1, 0]:
            return None
        weight = transpose.input[0]
    else:
        return None
    hidden = node.input[0]
    shape, of_weight = values.shape(hidden), values.shape(weight)
    inputs = {given.name for given in values.graph.input}
    if weight not in inputs or (bias and (bias not in inputs or values.shape(bias) != [classes])) or shape is None:
        return None
    if of_weight is None or len(of_weight) != 2 or of_weight[0] != classes or not isinstance(of_weight[1], int):
        return None
    typed = [name for name in (hidden, weight, bias) if name]
    return (hidden, weight, bias) if all(values.element_type(name) == _FLOAT for name in typed) else None
