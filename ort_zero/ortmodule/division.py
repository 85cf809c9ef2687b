"""Divide a training graph at its YieldOp into a forward and a backward model; pure functions of ONNX models.

Between forward and backward DeepSpeed releases and gathers weights, which gives the weights' memory away. So the
backward reads the weights anew, from what autograd saved, and no value that may share memory with a weight is passed:
chains of weights and constants alone are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from ort_zero.errors import ExportError

_REPEATED = frozenset("Cast Concat Constant Gather Identity Reshape Shape Slice Squeeze Transpose Unsqueeze".split())
"""Operators that the backward may compute again where all inputs are weights and constants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The two halves of a training graph."""

    forward: onnx.ModelProto
    results: tuple[str, ...]
    """The forward's outputs for the user."""
    kept: tuple[str, ...]
    """The forward's outputs that the backward reads; a result may be among them."""
    inputs_again: tuple[str, ...]
    """Inputs of the forward that the backward reads too."""
    gradients: dict[str, int]
    """The backward's inputs with gradients of results, and the number of each result."""
    backward_outputs: tuple[str, ...]
    """The backward's outputs, in the order of the training graph's."""
    backward_nodes: tuple[onnx.NodeProto, ...]
    whole: onnx.ModelProto
    """The training graph."""

    def backward(self, types: Mapping[str, onnx.ValueInfoProto]) -> onnx.ModelProto:
        """Return the backward model.

        Args:
            types: element types and sizes of the forward's outputs.
        """
        graph = self.whole.graph
        infos = {each.name: each for each in (*graph.value_info, *graph.output, *graph.input)} | dict(types)
        incoming = [_renamed(infos[self.results[index]], name) for name, index in self.gradients.items()]
        inputs = [*incoming, *(infos[name] for name in (*self.kept, *self.inputs_again))]
        outputs = [_renamed(infos[each.name], name) for each, name in zip(graph.output, self.backward_outputs)]
        return _model(self.whole, self.backward_nodes, inputs, outputs)


def divide(model: onnx.ModelProto, weights: frozenset[str]) -> Division:
    """Divide a training graph.

    Args:
        model: the training graph, with one YieldOp.
        weights: names of the inputs that are parameters.

    Raises:
        ExportError: the graph has no YieldOp, or several.
    """
    graph = model.graph
    yields = [node for node in graph.node if node.op_type == "YieldOp"]
    if len(yields) != 1:
        raise ExportError(f"the training graph has {len(yields)} nodes between forward and backward, not one")
    producers = {name: node for node in graph.node for name in node.output if name}
    inputs = [each.name for each in graph.input]
    forward = _needed(yields[0].input, producers)
    forward |= _shapes(graph.node, set(inputs) - weights)
    forward_nodes = [node for node in graph.node if id(node) in forward]
    backward_nodes = [node for node in graph.node if id(node) not in forward and node is not yields[0]]
    made = {name for node in forward_nodes for name in node.output}
    results, copies = _copied(yields[0].input, made)
    made_later = {name for node in backward_nodes for name in node.output}
    outputs, last_nodes = _copied([each.name for each in graph.output], made_later)
    repeated, reads = _reads([*backward_nodes, *last_nodes], producers, forward, weights | _names(graph.initializer))
    again = [node for node in forward_nodes if id(node) in repeated]
    kept = [name for node in forward_nodes for name in node.output if name in reads]
    infos = {each.name: each for each in graph.value_info}
    forward_nodes += copies
    read = {name for node in forward_nodes for name in names_read(node)}
    return Division(
        forward=_model(
            model,
            forward_nodes,
            [each for each in graph.input if each.name in read],
            [infos.get(name) or _untyped(name) for name in dict.fromkeys((*results, *kept))],
        ),
        results=tuple(results),
        kept=tuple(kept),
        inputs_again=tuple(name for name in inputs if name in reads),
        gradients=dict(zip(yields[0].output, _differentiable(yields[0]), strict=True)),
        backward_outputs=tuple(outputs),
        backward_nodes=(*again, *backward_nodes, *last_nodes),
        whole=model,
    )


def names_read(node: onnx.NodeProto) -> list[str]:
    """Return the values that a node reads, also inside of its graphs."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
        for graph in graphs:
            inside = {name for each in graph.node for name in each.output} | _names(graph.initializer)
            inside |= _names(graph.input)
            names += [name for each in graph.node for name in names_read(each) if name not in inside]
            names += [each.name for each in graph.output if each.name not in inside]
    return names


def _needed(names: Iterable[str], producers: Mapping[str, onnx.NodeProto]) -> set[int]:
    """Return the identities of the nodes that values depend on."""
    nodes, waiting = set[int](), list(names)
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and id(node) not in nodes:
            nodes.add(id(node))
            waiting += names_read(node)
    return nodes


def _shapes(nodes: Iterable[onnx.NodeProto], inputs: set[str]) -> set[int]:
    """Return the identities of the nodes that read the sizes of an input.

    The forward keeps these sizes alone. So a caller may change an input in place whose sizes the backward needs. The
    forward's own values are kept whole: ONNX Runtime compares their sizes with the graph's, and a kernel may not.
    """
    return {id(node) for node in nodes if node.op_type in ("Shape", "Size") and node.input[0] in inputs}


def _copied(names: Iterable[str], made: set[str]) -> tuple[list[str], list[onnx.NodeProto]]:
    """Return a name for each output, and nodes that copy outputs which would share memory.

    An output that no node of the half makes, or that comes twice, is copied.
    """
    outputs, copies = list[str](), list[onnx.NodeProto]()
    for index, name in enumerate(names):
        if name not in made or name in outputs:
            copies.append(helper.make_node("Identity", [name], [f"{name}_copy_{index}"]))
            name = f"{name}_copy_{index}"
        outputs.append(name)
    return outputs, copies


def _reads(
    backward: Sequence[onnx.NodeProto],
    producers: Mapping[str, onnx.NodeProto],
    forward: set[int],
    fixed: frozenset[str],
) -> tuple[set[int], set[str]]:
    """Return the forward's nodes that the backward repeats, and the names of other values that the backward reads.

    Args:
        backward: the backward's nodes.
        producers: the node that makes each value.
        forward: identities of the forward's nodes.
        fixed: names of weights and constants.
    """
    repeatable: dict[int, bool] = {}

    def is_repeatable(node: onnx.NodeProto) -> bool:
        if id(node) not in repeatable:
            repeatable[id(node)] = node.op_type in _REPEATED and all(
                name in fixed or (name in producers and is_repeatable(producers[name])) for name in names_read(node)
            )
        return repeatable[id(node)]

    repeated, reads = set[int](), set[str]()
    waiting = [name for node in backward for name in names_read(node)]
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        if node is None or (id(node) in forward and not is_repeatable(node)):
            reads.add(name)
        elif id(node) in forward and id(node) not in repeated:
            repeated.add(id(node))
            waiting += names_read(node)
    return repeated, reads


def _differentiable(yields: onnx.NodeProto) -> list[int]:
    """Return the numbers of the results whose gradients a YieldOp returns."""
    without = next((each.ints for each in yields.attribute if each.name == "non_differentiable_outputs"), ())
    return [index for index in range(len(yields.input)) if index not in without]


def _model(
    whole: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Return a model of some nodes of a training graph, with the constants and types of values that it needs."""
    read = {name for node in nodes for name in names_read(node)} | _names(outputs)
    made = {name for node in nodes for name in node.output} - _names(outputs)
    constants = [each for each in whole.graph.initializer if each.name in read]
    infos = [each for each in whole.graph.value_info if each.name in made]
    graph = helper.make_graph(list(nodes), "half", list(inputs), list(outputs), constants, value_info=infos)
    model = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
    model.graph.CopyFrom(graph)
    return model


def _names(values: Iterable[onnx.ValueInfoProto | onnx.TensorProto]) -> set[str]:
    return {each.name for each in values}


def _untyped(name: str) -> onnx.ValueInfoProto:
    return helper.make_empty_tensor_value_info(name)


def _renamed(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.name = name
    return copy
