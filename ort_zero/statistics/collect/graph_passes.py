"""Rewrite the calls of statistics' operators in graphs, so that they read values and change nothing.

The operators are those of :mod:`.graph_operators`; a compile backend calls the passes. In Dynamo's graph a hook has
left a call of ``observe``. :func:`follow_gradients` adds ``pass_through`` where the tensor is made, and AOTAutograd
derives its backward. :func:`remove_pass_throughs` takes them out again: ``observe`` reads the value itself, and in
the backward ``observe_gradient`` reads the tensor's whole gradient. Neither has a user, so segments are divided no
further.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ort_zero.compat.module_paths import module_path
from ort_zero.compat.operator_mode import computed_by
from ort_zero.compat.torch_compile import tree_leaves
from ort_zero.compat.torch_modules import is_view, version_of
from ort_zero.statistics.collect import graph_operators, operators

_OBSERVE, _OBSERVE_GRADIENT, _PASS_THROUGH, _GRADIENT_PASSES = (
    getattr(torch.ops.ort_zero, name).default for name in graph_operators.NAMES
)
_OBSERVE_OPERATOR = torch.ops.ort_zero.observe_operator.default


def is_observation(node: Node) -> bool:
    """Return True for a call of an operator of statistics."""
    return node.target in (_OBSERVE, _OBSERVE_GRADIENT, _OBSERVE_OPERATOR)


def follow_gradients(module: GraphModule) -> None:
    """Add to a graph of Dynamo what the backward needs to meet the gradients of observed tensors."""
    keys = itertools.count()
    for part in module.modules():
        if isinstance(part, GraphModule) and any(node.target is _OBSERVE for node in part.graph.nodes):
            _follow_gradients(part.graph, keys, is_nested=part is not module)
            part.recompile()


def _follow_gradients(graph: Graph, keys: Iterator[int], is_nested: bool) -> None:
    followed: set[Node] = set()
    for node in list(graph.nodes):
        tensor: Any = node.args[0] if node.target is _OBSERVE else None
        if tensor is None or tensor in followed:
            continue
        value = tensor.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if is_nested and tensor.op == "placeholder":
            continue  # a region of activation checkpointing is not the tensor's only reader
        if version_of(value) and (is_view(value) or tensor.op in ("placeholder", "get_attr")):
            continue  # a change in place must reach the tensor itself where the graph did not make the memory
        key = next(keys)
        after = tensor.next
        while after.op == "placeholder":
            after = after.next
        with graph.inserting_before(after):
            passed = graph.call_function(_PASS_THROUGH, (tensor, key))
        passed.meta = dict(tensor.meta)
        tensor.replace_all_uses_with(passed, delete_user_cb=functools.partial(operator.is_not, passed))
        node.args = (*node.args, key)
        followed.add(passed)


def remove_pass_throughs(graph: Graph) -> None:
    """Remove the pass-throughs from a joint or an inference graph; backward calls of them show gradients instead."""
    tokens = {node.args[6]: node for node in graph.nodes if node.target is _OBSERVE and len(node.args) > 6}
    for node in list(graph.nodes):
        if node.target is _OBSERVE:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # a second run would be a call of the module
        elif node.target in (_PASS_THROUGH, _GRADIENT_PASSES):
            if node.target is _GRADIENT_PASSES and node.args[1] in tokens:
                with graph.inserting_before(node):
                    shown = graph.call_function(_OBSERVE_GRADIENT, (node.args[0], tokens[node.args[1]]))
                shown.meta = {name: value for name, value in node.meta.items() if name != "val"}
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def erase_from_backward(backward: Graph) -> None:
    """Erase the forward's calls of ``observe`` from a backward graph, which the partitioner has copied there."""
    for node in list(backward.nodes):
        if node.target is _OBSERVE and not node.users:
            backward.erase_node(node)


def observe_operators(graph: Graph, direction: str) -> None:
    """Have a unit's graph show what each operator takes and returns, if the next step is recorded.

    Args:
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
    """
    order = {node: index for index, node in enumerate(graph.nodes)} if operators.recorders else {}
    for node in order:
        name = computed_by(node.target) if node.op == "call_function" else None
        made: list[Any] = [(0, node)]
        if not _is_tensor(node):
            made = [(each.args[1], each) for each in node.users if each.target is operator.getitem and _is_tensor(each)]
        again = direction == "backward" and node.meta.get("partitioner_tag") == "is_forward"
        if name is None or not made or again:
            continue
        places, results = map(list, zip(*made))
        taken = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node) and _is_tensor(leaf)]
        with graph.inserting_after(max(results, key=order.__getitem__)):
            graph.call_function(_OBSERVE_OPERATOR, (taken, results, len(operators.in_graphs)))
        phase, line = direction.replace("inference", "forward"), operators.line_of(node.meta.get("stack_trace") or "")
        operators.in_graphs.append((name, operators.Origin(phase, module_path(node), line), places))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
