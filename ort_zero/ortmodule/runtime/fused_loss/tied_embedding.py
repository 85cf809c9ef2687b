"""Adds the gradient of an embedding to that of a head with the same weight, row by row, in the head's memory.

ORT's gradient builder makes a gradient of the whole table for each use, mostly zeros for an embedding, and sums them:
three times the size of the largest weight of a language model, for some hundred rows.
"""

from __future__ import annotations

import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import ATEN_DOMAIN, aten_node, replace_field, with_values
from ort_zero.ortmodule.runtime.fused_loss import operators

_HEAD = {f"{operators.NAMESPACE}::{name}".encode() for name in ("scaled", "scaled_sum")}
_EMBEDDING = {b"embedding_backward", b"aten::embedding_backward"}


def add_embeddings_in_place(model: onnx.ModelProto) -> int:
    """Replace sums of a fused head's gradient and gradients of embeddings; changes `model`.

    Args:
        model: a gradient graph.

    Returns:
        How many gradients of embeddings are added row by row.
    """
    values = GraphValues(model, "ort_zero_tied")
    new: dict[int, list[onnx.NodeProto]] = {}
    gone: set[int] = set()
    for node in model.graph.node:
        if node.op_type == "Sum" and not node.domain:
            embeddings = [name for name in node.input if _is_plain_embedding(values, name)]
            heads = [name for name in node.input if _operator(values, name) in _HEAD and _read_here_alone(values, name)]
            if embeddings and len(heads) == 1:
                new[id(node)] = _added(values, node, heads[0], embeddings)
                gone.update(id(values.producers[name]) for name in embeddings)
    if new:
        nodes: list[onnx.NodeProto] = []
        for node in model.graph.node:
            nodes += new.get(id(node), [node] if id(node) not in gone else [])
        replace_field(model.graph, "node", _without_unread_sizes(nodes))
        made = {name for node in model.graph.node for name in node.output}
        replace_field(model.graph, "value_info", [value for value in model.graph.value_info if value.name in made])
    return len(gone)


def _added(values: GraphValues, node: onnx.NodeProto, head: str, embeddings: list[str]) -> list[onnx.NodeProto]:
    """Return the nodes in place of a Sum: each adds one embedding's gradient, and the last one what else there is."""
    others = [name for name in node.input if name != head and name not in embeddings]
    target, found = head, []
    for number, name in enumerate(embeddings):
        gradient = values.producers[name]
        last = number == len(embeddings) - 1 and not others
        result = node.output[0] if last else f"{node.output[0]}_rows_{number}"
        if not last:
            values.declare(result, onnx.TensorProto.FLOAT, values.shape(head))
        given = [target, gradient.input[0], gradient.input[1], gradient.input[3]]
        found.append(aten_node(operators.ADD_ROWS, given, [result], f"{result}_add"))
        target = result
    if others:
        found.append(with_values(node, inputs=[*others, target]))
    return found


def _is_plain_embedding(values: GraphValues, name: str) -> bool:
    """Return whether a value is an embedding's dense gradient, of which each row counts alike, and is read once."""
    if _operator(values, name) not in _EMBEDDING or not _read_here_alone(values, name):
        return False
    given = values.producers[name].input
    flags = [values.constant(flag) for flag in given[4:6]]  # scale_grad_by_freq, sparse
    return len(flags) == 2 and all(flag is not None and not flag.any() for flag in flags)


def _read_here_alone(values: GraphValues, name: str) -> bool:
    reader = values.sole_reader(name)
    return reader is not None and list(reader.input).count(name) == 1


def _operator(values: GraphValues, name: str) -> bytes | None:
    """Return the operator of the ATen node that makes a value, None for any other node."""
    node = values.producers.get(name)
    return attributes(node).get("operator") if node is not None and node.domain == ATEN_DOMAIN else None


def _without_unread_sizes(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Leave out what has only told an embedding's gradient how many rows the table has."""
    for op_type in ("Gather", "Shape"):  # the one reads the other
        read = {name for node in nodes for name in node.input}
        nodes = [
            node
            for node in nodes
            if node.op_type != op_type or "/ATen_Grad/" not in node.output[0] or read.intersection(node.output)
        ]
    return nodes
