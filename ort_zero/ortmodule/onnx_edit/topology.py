"""Reads an ONNX graph: what a node reads, which node produces a value, in which order the nodes can run.

The ONNX project's ``onnx_ir`` knows all of this too. It is not used: its graphs are objects of their own, so each model
would be converted before and after every tool of ORT's, which take and return protobuf, and users would install one
package more, in exchange for the functions below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import onnx

from ort_zero.errors import GraphEditError

RANDOM_OPERATORS = frozenset(
    ("Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial",
     "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "multinomial", "bernoulli")
)  # fmt: skip
"""Operators whose result differs from run to run; the last two are operators of ATen nodes."""


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def captured_inputs(node: onnx.NodeProto) -> list[str]:
    """Return the outer values that the bodies of an If, Loop or Scan node read without naming them as inputs."""
    free: list[str] = []
    for body in subgraphs(node):
        bound = {i.name for i in body.input} | {i.name for i in body.initializer}
        for inner in body.node:
            for name in input_names(inner):
                if name not in bound and name not in free:
                    free.append(name)
            bound.update(inner.output)
        for output in body.output:
            if output.name not in bound and output.name not in free:
                free.append(output.name)
    return free


def input_names(node: onnx.NodeProto) -> list[str]:
    """Return the names of all values that a node reads, those that its bodies capture included."""
    return [name for name in node.input if name] + captured_inputs(node)


def output_names(node: onnx.NodeProto) -> list[str]:
    """Return the names of the values that a node produces; outputs that it leaves out have no name."""
    return [name for name in node.output if name]


def node_key(node: onnx.NodeProto) -> str:
    """Return a name that is unique in the graph, unlike ``node.name``: that of the first output."""
    return next(name for name in node.output if name)


def producers(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    """Return for each value that one of `nodes` produces that node."""
    return {name: node for node in nodes for name in node.output if name}


def value_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Return the tensor types that the graph states, by the name of the value."""
    return {v.name: v.type.tensor_type for v in chain(graph.value_info, graph.input, graph.output)}


def is_random(node: onnx.NodeProto) -> bool:
    """Return True if running the node twice gives two results."""
    name = node.op_type
    if name == "ATen":
        name = next((a.s.decode() for a in node.attribute if a.name == "operator"), name)
    return name in RANDOM_OPERATORS or any(is_random(inner) for body in subgraphs(node) for inner in body.node)


def topological_order(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto] | None = None) -> list[onnx.NodeProto]:
    """Return nodes in a stable topological order: one that can run, and stays as it is if it could run already.

    Args:
        graph: gives the names that exist before the first node runs (inputs and initializers).
        nodes: to be sorted; None for those of `graph`.

    Raises:
        GraphEditError: the graph has a cycle, or a node reads a value that nothing makes.
    """
    nodes = list(graph.node if nodes is None else nodes)
    made_by = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    state = [0] * len(nodes)  # 0 new, 1 open, 2 done
    order: list[onnx.NodeProto] = []
    for root in range(len(nodes)):
        stack = [(root, iter(input_names(nodes[root])))] if state[root] == 0 else []
        while stack:
            index, inputs = stack[-1]
            state[index] = 1
            for name in inputs:
                source = made_by.get(name)
                if source is None:
                    if name not in known:
                        raise GraphEditError(f"node {nodes[index].name!r} reads {name!r}, which nothing makes")
                elif state[source] == 1:
                    raise GraphEditError(f"the graph has a cycle through {nodes[source].name!r}")
                elif state[source] == 0:
                    stack.append((source, iter(input_names(nodes[source]))))
                    break
            else:
                state[index] = 2
                order.append(nodes[index])
                stack.pop()
    return order


def nodes_reached_from(
    nodes: Sequence[onnx.NodeProto], values: Iterable[str], roots: Iterable[onnx.NodeProto] = ()
) -> list[onnx.NodeProto]:
    """Return those of `nodes` on which `values` or the nodes `roots` depend, `roots` included, in the order of `nodes`.

    The order of `nodes` does not matter otherwise.
    """
    made_by = producers(nodes)
    reached: set[int] = set()
    stack = [made_by[name] for name in values if name in made_by]
    stack += roots
    while stack:
        node = stack.pop()
        if id(node) in reached:
            continue
        reached.add(id(node))
        stack += [made_by[name] for name in input_names(node) if name in made_by]
    return [node for node in nodes if id(node) in reached]
