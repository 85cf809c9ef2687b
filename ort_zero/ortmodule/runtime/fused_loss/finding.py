"""Finds a language-model head with its cross entropy in an exported model."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes, swaps_two_dimensions

FLOAT = onnx.TensorProto.FLOAT
_LOSSES = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal")


@dataclass(frozen=True, slots=True)
class Head:
    """A head and its loss in a graph."""

    loss: onnx.NodeProto
    hidden: str
    weight: str
    bias: str
    logits: str
    slices: tuple[onnx.NodeProto, ...]
    """What lies between logits and loss: each takes a part of the rows. In the order of the graph."""
    shapes: tuple[onnx.NodeProto, ...]
    """Nodes that read the shape of the logits, or of what a slice takes of them."""
    output: str
    """Name of the result of the graph that holds the logits; "" for none."""
    ignored: int
    mean: bool
    classes: int


def find_head(values: GraphValues, loss: onnx.NodeProto) -> Head | None:
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
    named = (logits, *(node.output[0] for node in slices))
    shapes = tuple(node for name in named for node in values.readers.get(name, []) if node.op_type == "Shape")
    return Head(loss, *layer, logits, slices, shapes, output, ignored, reduction == b"mean", shape[1])


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
        sized = False
        if node.op_type == "Slice" and _takes_rows(values, node, len(shape)):
            slices.append(node)
            sized = True
        elif node.op_type not in ("Reshape", "Identity", "Flatten"):
            return None
        elif slices and node.op_type != "Identity":
            return None  # rows of another numbering
        # what else reads it would have to be computed
        if len([one for one in values.readers[name] if not (sized and one.op_type == "Shape")]) != 1:
            return None
        name = node.input[0]


def _takes_rows(values: GraphValues, node: onnx.NodeProto, rank: int) -> bool:
    """Return whether a Slice leaves all classes."""
    if len(node.input) < 4 or not node.input[3]:
        return False
    axes = values.integers(node.input[3])
    return axes is not None and all(axis % rank != rank - 1 for axis in axes)


def _returned(values: GraphValues, logits: str, path: tuple[onnx.NodeProto, ...]) -> str | None:
    """Return the name of the result that holds the logits, "" for none; None if they are read elsewhere too."""
    if logits in values.outputs:
        return None
    output, to_loss = "", 0
    for reader in values.readers.get(logits, []):
        name = reader.output[0]
        if reader.op_type == "Shape":
            continue
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
        if transpose is None or not swaps_two_dimensions(transpose):
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
    return (hidden, weight, bias) if all(values.element_type(name) == FLOAT for name in typed) else None
