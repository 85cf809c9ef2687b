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

from ort_zero.ortmodule.compat.ortmodule import GraphInfo
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import ATEN_DOMAIN, aten_node, copied, replace_field
from ort_zero.ortmodule.runtime.fused_loss import operators
from ort_zero.ortmodule.runtime.fused_loss.finding import FLOAT, Head, find_head

LARGE = 4096
"""Number of classes from which a head is large enough to be worth it."""
_PREFIX = "ort_zero_fused_loss"


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


def fuse_loss(
    model: onnx.ModelProto, trained: Collection[str], *, results: int, least_classes: int = LARGE, small: bool = False
) -> FusedLoss | None:
    """Make one node of the head and its loss, in place; None if there is none that can be taken.

    Args:
        model: exported, with the shapes of its values.
        trained: names of the graph inputs whose gradient is wanted.
        results: number of outputs of the graph that are the model's; the others are read by the runtime.
        least_classes: smaller heads stay as they are.
        small: compute fewer logits at a time: takes less memory, and longer.
    """
    values = GraphValues(model, _PREFIX)
    head = _head_of(values, results)
    if head is None or head.classes < least_classes:
        return None
    names = [output.name for output in model.graph.output]
    operators.register()
    _insert(model, values, head, head.weight in trained, _logits_at_once(head, small))
    if not head.output:
        return FusedLoss(None)
    return FusedLoss(ReturnedLogits(names.index(head.output), len(names), 2 if head.bias else 1))


def shape_of_logits(model: onnx.ModelProto, *, results: int) -> list[int | str] | None:
    """Return the sizes of the logits that :func:`fuse_loss` would not compute as a whole, None if there are none.

    Args:
        model: see :func:`fuse_loss`.
        results: see :func:`fuse_loss`.
    """
    values = GraphValues(model, _PREFIX)
    head = _head_of(values, results)
    return None if head is None else [*(values.shape(head.hidden) or [""])[:-1], head.classes]


def _head_of(values: GraphValues, results: int) -> Head | None:
    """Return the head that can be one node with its loss; None if there is none, or more than one."""
    graph = values.graph
    heads = [head for node in graph.node if (head := find_head(values, node)) is not None]
    # of several heads each has rows and logits of its own
    if len(heads) != 1:
        return None
    names = [output.name for output in graph.output]
    return None if heads[0].output and names.index(heads[0].output) >= results else heads[0]


def without_zeros(info: GraphInfo, returned: ReturnedLogits) -> GraphInfo:
    """Return what is known of a gradient graph where no gradient of the copies need be filled with zeros."""
    copies = range(returned.first, returned.first + returned.count)
    full = [i for i in info.output_grad_indices_require_full_shape if i not in copies]
    return replace(info, output_grad_indices_require_full_shape=full)


def _logits_at_once(head: Head, small: bool) -> int:
    """Return how many logits the node of a head computes at a time."""
    if not small:
        return operators.CHUNK
    return min(operators.CHUNK, max(operators.SMALL_CHUNK, operators.LEAST_ROWS * head.classes))


def _insert(model: onnx.ModelProto, values: GraphValues, head: Head, weight_gradient: bool, at_once: int) -> None:
    """Replace loss, slices and head by one node; what nothing reads any more goes too."""
    graph = model.graph
    parts, hidden = _hidden_parts(values, head)
    fused, copies = _fused_nodes(values, head, hidden, weight_gradient, at_once)
    if head.output:
        fused += _returned_nodes(graph, values, head, copies)
    replaced = {id(head.loss): fused} | {id(node): [part] for node, part in zip(head.slices, parts, strict=True)}
    _put_in_place(graph, head.output, replaced | _shape_nodes(values, head))
    if not any(opset.domain == ATEN_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ATEN_DOMAIN, 1))


def _hidden_parts(values: GraphValues, head: Head) -> tuple[list[onnx.NodeProto], str]:
    """Return the nodes that take those rows of the head's input of whose logits there is a loss, and their result."""
    hidden, found = head.hidden, []
    for i, node in enumerate(head.slices):
        part = copied(node)
        part.input[0], part.output[0] = hidden, _part(i)
        shape = values.shape(node.output[0])
        width = (values.shape(head.hidden) or [""])[-1]
        values.declare(part.output[0], FLOAT, [*shape[:-1], width] if shape else None)
        hidden = part.output[0]
        found.append(part)
    return found, hidden


def _part(number: int) -> str:
    """Return the name of what the slice with this number, from 0, takes of the head's input."""
    return f"{_PREFIX}_part_{number}"


def _fused_nodes(
    values: GraphValues, head: Head, hidden: str, weight_gradient: bool, at_once: int
) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """Return the node of head and loss, and its copies of weight and bias by the names that they are returned by."""
    constants = [
        values.add_constant(head.ignored, np.int64),
        values.add_constant(head.mean, np.bool_),
        values.add_constant(weight_gradient, np.bool_),
        values.add_constant(at_once, np.int64),
    ]
    layer = [name for name in (head.weight, head.bias) if name]
    results = [head.loss.output[0], *(f"{_PREFIX}_gradient_{i}" for i in range(3 if head.bias else 2))]
    for name, like in zip(results[1:], (hidden, *layer), strict=True):
        values.declare(name, FLOAT, values.shape(like))
    copies = {f"{_PREFIX}_{kind}": f"{_PREFIX}_{kind}_copy" for kind in ("weight", "bias")[: len(layer)]}
    if not head.output:
        copies = {}
    for made, like in zip(copies.values(), layer, strict=False):
        values.declare(made, FLOAT, values.shape(like))  # ORT knows the results of ATen nodes from here alone
    operator = operators.name_of(bias=bool(head.bias), copies=bool(copies))
    given = [hidden, *layer, head.loss.input[1], *constants]
    return [aten_node(operator, given, [*results, *copies.values()], f"{_PREFIX}_node")], copies


def _returned_nodes(
    graph: onnx.GraphProto, values: GraphValues, head: Head, copies: dict[str, str]
) -> list[onnx.NodeProto]:
    """Let the graph return the head's input in place of the logits, and the copies at the end; return the nodes for it.

    Args:
        graph: is changed.
        values: of the graph.
        head: returns its logits.
        copies: copies of weight and bias by the names that they are returned by.
    """
    outputs = list(graph.output)
    at = next(i for i, output in enumerate(outputs) if output.name == head.output)
    states, returned = f"{_PREFIX}_hidden_copy", f"{_PREFIX}_hidden"
    shape = values.shape(head.hidden)
    outputs[at] = helper.make_tensor_value_info(returned, FLOAT, shape)
    for name, like in zip(copies, (head.weight, head.bias), strict=False):
        outputs.append(helper.make_tensor_value_info(name, FLOAT, values.shape(like)))
    replace_field(graph, "output", outputs)
    values.declare(states, FLOAT, shape)
    # ORT gives the memory of a result to others once the graph has read it
    nodes = [aten_node(operators.COPY, [head.hidden], [states], states)]
    for result, made in {returned: states, **copies}.items():
        nodes.append(helper.make_node("Identity", [made], [result], result))
    return nodes


def _shape_nodes(values: GraphValues, head: Head) -> dict[int, list[onnx.NodeProto]]:
    """Return what computes the shape of logits from that of hidden states, by the id of the Shape that it replaces."""
    of_hidden = {head.logits: head.hidden} | {node.output[0]: _part(i) for i, node in enumerate(head.slices)}
    found = {}
    for node in head.shapes:
        result = node.output[0]
        whole, rows, all_sizes = (f"{result}_{name}" for name in ("of_hidden", "of_rows", "of_logits"))
        first, last, end = (values.add_constant([number], np.int64) for number in (0, -1, 2**31 - 1))
        classes = values.add_constant([head.classes], np.int64)
        given = attributes(node)
        found[id(node)] = [
            helper.make_node("Shape", [of_hidden[node.input[0]]], [whole], whole),
            helper.make_node("Slice", [whole, first, last, first], [rows], rows),
            helper.make_node("Concat", [rows, classes], [all_sizes], all_sizes, axis=0),
            helper.make_node(
                "Slice",
                [
                    all_sizes,
                    values.add_constant([given.get("start", 0)], np.int64),
                    values.add_constant([given["end"]], np.int64) if "end" in given else end,
                    first,
                ],
                [result],
                f"{result}_slice",
            ),
        ]
    return found


def _put_in_place(graph: onnx.GraphProto, output: str, replaced: dict[int, list[onnx.NodeProto]]) -> None:
    """Put nodes in the place of others; leave out what nothing reads any more.

    Args:
        graph: is changed.
        output: name of a result that the graph does not have any more, "" for none.
        replaced: new nodes by the id of the node in whose place they come.
    """
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if id(node) in replaced:
            nodes += replaced[id(node)]
        elif not output or output not in node.output:
            nodes.append(node)
    replace_field(graph, "node", _without_unread(nodes, {output.name for output in graph.output}))
    named = {name for node in graph.node for name in node.output}
    replace_field(graph, "value_info", [value for value in graph.value_info if value.name in named])


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
