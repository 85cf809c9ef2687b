"""Changes nodes and models of ONNX; functions that change what they are given say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import onnx
from google.protobuf.message import Message
from onnx import helper

from ort_zero.ortmodule.onnx_edit.topology import input_names, nodes_reached_from, subgraphs

M = TypeVar("M", bound=Message)
ATEN_DOMAIN = "org.pytorch.aten"
"""Domain of the nodes that run an operator of PyTorch."""


def copied(message: M) -> M:
    """Return a deep copy of a protobuf message: a model, a node, the type of a value."""
    result = type(message)()
    result.CopyFrom(message)
    return result


def with_values(
    node: onnx.NodeProto, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> onnx.NodeProto:
    """Return a copy of `node` that reads or produces other values; None leaves those as they are."""
    result = copied(node)
    for field, names in (("input", inputs), ("output", outputs)):
        if names is not None:
            result.ClearField(field)
            getattr(result, field).extend(names)
    return result


def aten_node(operator: str, inputs: Sequence[str], outputs: Sequence[str], name: str) -> onnx.NodeProto:
    """Return a node that runs an operator of PyTorch.

    Args:
        operator: its name with its namespace; one of PyTorch's own needs none.
        inputs: names of the values that it reads, "" for None.
        outputs: names of its results.
        name: name of the node.
    """
    return helper.make_node("ATen", inputs, outputs, name, domain=ATEN_DOMAIN, operator=operator)


def with_nodes(model: onnx.ModelProto, nodes: Iterable[Any]) -> onnx.ModelProto:
    """Return a copy of `model` that consists of `nodes`, in their order."""
    nodes = list(nodes)
    result = copied(model)
    result.graph.ClearField("node")
    result.graph.node.extend(nodes)
    return result


def replace_field(message: Message, field: str, content: Iterable[Any]) -> None:
    """Put `content` in place of what a repeated field of `message` holds; changes `message`."""
    content = [copied(item) for item in content]  # some of it may be what the field holds
    message.ClearField(field)
    getattr(message, field).extend(content)


def remove_unread_initializers(graph: onnx.GraphProto) -> int:
    """Remove the initializers that no node reads and that are no results; changes `graph`; return their number.

    ONNX Runtime warns of each when a session is made. Edits that leave nodes out leave such constants behind.
    """
    read = {output.name for output in graph.output}.union(*(input_names(node) for node in graph.node))
    unread = [i for i, tensor in enumerate(graph.initializer) if tensor.name not in read]
    for i in reversed(unread):
        del graph.initializer[i]
    return len(unread)


def keep_results(model: onnx.ModelProto, kept: Sequence[int]) -> None:
    """Keep the results of these indices in this order, and of the graph what they depend on; changes `model`.

    Inputs that nothing read before stay.

    Args:
        model: its nodes are in topological order.
        kept: indices of results, each of them once.
    """
    graph = model.graph
    read_before = set().union(*(input_names(node) for node in graph.node), (result.name for result in graph.output))
    replace_field(graph, "output", [graph.output[i] for i in kept])
    results = {result.name for result in graph.output}
    replace_field(graph, "node", nodes_reached_from(graph.node, results))
    read = results.union(*(input_names(node) for node in graph.node))
    replace_field(graph, "input", [i for i in graph.input if i.name in read or i.name not in read_before])
    made = read.union(*(node.output for node in graph.node))
    replace_field(graph, "value_info", [value for value in graph.value_info if value.name in made])
    remove_unread_initializers(graph)


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values that `node` reads, in its bodies too unless a name is bound there; changes `node`.

    Args:
        node: to be changed.
        names: new names by old ones.
    """
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for body in subgraphs(node):
        bound = {i.name for i in body.input} | {i.name for i in body.initializer}
        bound |= {out for inner in body.node for out in inner.output}
        inside = {old: new for old, new in names.items() if old not in bound}
        for inner in body.node:
            rename_inputs(inner, inside)
        for output in body.output:
            if output.name in inside:
                # a body's output must be produced in the body
                inner = helper.make_node("Identity", [inside[output.name]], [output.name])
                body.node.append(inner)
