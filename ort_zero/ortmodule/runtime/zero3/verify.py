"""Verifies a graph into which the collectives of a plan were put, before ORT runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import onnx

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.onnx_edit.topology import input_names, is_random, output_names, topological_order
from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Phase, Reduce
from ort_zero.ortmodule.runtime.zero3.graph_analysis import OPAQUE_OPERATORS
from ort_zero.ortmodule.runtime.zero3.node_names import TRIGGER, event_index, gathered_name, is_collective, token_name


def verify(model: onnx.ModelProto, plan: CollectivePlan) -> None:
    """Raise unless `model` keeps the rules of a graph with collectives.

    Rules: no weight is a graph input or read by a node; the graph is acyclic and every value is made; each gradient in
    the plan is reduced exactly once and is no graph output; the backward never reads what the forward gathered; the
    tokens form one chain through all events in the plan's order.

    Raises:
        GraphEditError: names the rule and the weight or node.
    """
    graph = model.graph
    weights = set(plan.weights) if plan.gathers_weights else set()
    left = [i.name for i in graph.input if i.name in weights]
    if left:
        raise GraphEditError(f"weights are still graph inputs: {left}")
    nodes = topological_order(graph)
    _verify_no_node_reads(nodes, weights)
    _verify_backward_gathers_anew(nodes, {i.name for i in graph.initializer}, plan)
    collectives = [node for node in nodes if is_collective(node)]
    _verify_token_chain(collectives, len(plan.events))
    _verify_reduced_once(collectives, {o.name for o in graph.output}, plan)


def _verify_no_node_reads(nodes: Sequence[onnx.NodeProto], weights: Collection[str]) -> None:
    for node in nodes:
        for name in input_names(node):
            if name in weights:
                raise GraphEditError(f"node {node.name!r} still reads the weight {name!r}")


def _verify_backward_gathers_anew(
    nodes: Sequence[onnx.NodeProto], initializers: Collection[str], plan: CollectivePlan
) -> None:
    """Raise if a node of the backward reads a weight of the forward, or what the forward has computed from it only.

    Args:
        nodes: in a topological order.
        initializers: names of values that are there before the first node runs.
        plan: plan of the graph.
    """
    from_forward = {gathered_name(w, i) for i, g in plan.gathers(Phase.FORWARD) for w in g.weights}
    constant = set(initializers)
    backward: set[str] = set()
    for node in nodes:
        names, produced = input_names(node), output_names(node)
        # a collective waits for the one before by its token, the first input: that says nothing about its phase
        data = names[1:] if is_collective(node) else names
        if node.op_type == "YieldOp" or any(name in backward for name in data):
            backward.update(produced)
            bad = next((name for name in names if name in from_forward), None)
            if bad and node.op_type != "YieldOp" and not is_collective(node):
                raise GraphEditError(f"backward node {node.name!r} reads {bad!r}, which the forward gathered")
        elif node.op_type not in OPAQUE_OPERATORS and not is_random(node):
            if all(name in constant for name in names) and (names or node.op_type == "Constant"):
                constant.update(produced)
            elif names and all(name in from_forward or name in constant for name in names):
                from_forward.update(produced)


def _verify_token_chain(collectives: Sequence[onnx.NodeProto], number: int) -> None:
    """Raise unless there is one node for each of `number` events, which waits for the event before."""
    token_of: dict[int, str] = {}
    for node in collectives:
        index = event_index(node)
        if index in token_of:
            raise GraphEditError(f"event {index} happens twice")
        token_of[index] = node.input[0]
    for index in range(number):
        if token_of.get(index) != (token_name(index - 1) if index else TRIGGER):
            raise GraphEditError(f"event {index} is not in the token chain")


def _verify_reduced_once(collectives: Sequence[onnx.NodeProto], outputs: Collection[str], plan: CollectivePlan) -> None:
    reduced: Counter[str] = Counter()
    for node in collectives:
        event = plan.events[event_index(node)]
        if isinstance(event, Reduce):
            reduced.update(node.input[1 : len(node.input) - len(event.after)])
    for _, event in plan.reduces():
        for weight, gradient in zip(event.weights, event.gradients, strict=True):
            if reduced[gradient] != 1 or gradient in outputs:
                raise GraphEditError(f"the gradient of {weight!r} is reduced {reduced[gradient]} times, not once")
