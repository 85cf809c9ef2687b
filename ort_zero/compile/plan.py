"""Divide an FX graph into segments for ONNX Runtime and calls that PyTorch runs. Pure: nothing is built or run here.

A segment holds all nodes for ONNX Runtime of one level: the number of alternations between the two runtimes on the way
to a node. Views and constants belong to no segment: a segment repeats those that it reads, and PyTorch makes the others
from their base, which costs nothing. A large product whose result no segment reads, as the gradient of a weight, is a
segment of its own: it is placed by its own time, beside which a session's call costs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ort_zero.compat.torch_compile import HigherOrderOperator, OpOverload
from ort_zero.compat.torch_graphs import is_random, schema_of
from ort_zero.compile.conversion.creation import CONSTANTS
from ort_zero.compile.conversion.fragments import Fragment, NotConvertibleError
from ort_zero.compile.conversion.registry import convert
from ort_zero.compile.conversion.views import VIEWS
from ort_zero.compile.flops import flops_of
from ort_zero.runtimes import observing

_LARGE = 10**9
"""Floating-point operations from which on a product can be a segment of its own; they take 10 ms on one core."""
_COPIES = frozenset({torch.ops.aten.clone.default})
"""Free within a segment, as views are; PyTorch makes a real copy of them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that one ONNX model computes."""

    nodes: tuple[Node, ...]
    """All nodes in order, with the views and constants that they read."""
    inputs: tuple[Node, ...]
    """The tensors that the segment reads, and the sizes (SymInts) that PyTorch's form of the segment reads."""
    outputs: tuple[Node, ...]
    """The results that others read."""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """One node that PyTorch runs: an operator, a view or a constant between segments."""

    node: Node


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a graph."""

    steps: tuple[Segment | TorchCall, ...]
    fragments: Mapping[Node, Fragment]
    """The ONNX form of each node that has one."""
    reasons: Mapping[Node, str]
    """Why PyTorch runs each operator that has no ONNX form."""
    placeholders: tuple[Node, ...]
    output: Node


Supports = Callable[[Node, Fragment], str | None]
"""Returns why the device's provider cannot run a fragment, or None."""


def make_plan(graph: Graph, *, widen: bool, supports: Supports, refusal: Callable[[Node], str | None]) -> Plan:
    """Return the plan of a graph.

    Args:
        graph: a functional graph of ATen calls with fake tensors in ``meta["val"]``.
        widen: compute 16-bit floats in float32.
        supports: tells what the device's provider cannot run.
        refusal: returns why PyTorch runs a node in any case; None for a node that ONNX Runtime may run.
    """
    nodes = list(graph.nodes)
    fragments, reasons = _converted(nodes, widen, supports, refusal)
    free = _free_nodes(nodes, fragments)
    levels = _levels(nodes, fragments, free)
    output = nodes[-1]
    steps: list[Segment | TorchCall] = []
    for members in _groups(nodes, fragments, free, levels):
        if members[0] in fragments:
            steps.append(_segment(members, free, output))
        else:
            steps += map(TorchCall, members)
    steps = [step for step in steps if not isinstance(step, Segment) or step.outputs]
    return Plan(
        steps=tuple(_with_views(steps, free, output)),
        fragments=fragments,
        reasons=reasons,
        placeholders=tuple(node for node in nodes if node.op == "placeholder"),
        output=output,
    )


def _converted(
    nodes: Iterable[Node], widen: bool, supports: Supports, refusal: Callable[[Node], str | None]
) -> tuple[dict[Node, Fragment], dict[Node, str]]:
    fragments: dict[Node, Fragment] = {}
    reasons: dict[Node, str] = {}
    for node in nodes:
        if (
            node.op != "call_function"
            or observing.is_observation(node)
            or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        ):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source not in fragments:
            continue  # an item of a call that PyTorch runs
        why = refusal(node)
        if why is not None:
            reasons[node] = why
            continue
        try:
            fragment = convert(node, widen)
            reason = supports(node, fragment)
        except NotConvertibleError as error:
            reason = str(error)
        except Exception as error:  # a fault of a conversion must not end the user's training
            reason = f"the conversion failed with {type(error).__name__}: {error}"
        if reason is None:
            fragments[node] = fragment
        elif source is None:
            reasons[node] = reason
    for node in [n for n in fragments if _several(n) and any(user not in fragments for user in n.users)]:
        # a tuple whose items are not all tensors of a segment
        reasons[node] = "a result that ONNX Runtime cannot hold"
        for gone in (node, *node.users):
            fragments.pop(gone, None)
    return fragments, reasons


def _several(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _free_nodes(nodes: Iterable[Node], fragments: Mapping[Node, Fragment]) -> set[Node]:
    """Return the views and constants that a segment repeats where it reads them."""
    free: set[Node] = set()
    for node in nodes:
        if node not in fragments:
            continue
        if node.target is operator.getitem:
            if node.args[0] in free:
                free.add(node)
        elif node.target in VIEWS or node.target in CONSTANTS or node.target in _COPIES:
            free.add(node)
    return free


def roots(node: Node, free: set[Node]) -> Iterator[Node]:
    """Yield the nodes whose results must exist before `node` can be made: the node itself, or the bases of a view."""
    if node not in free:
        yield node
        return
    for argument in node.all_input_nodes:
        yield from roots(argument, free)


def is_ordered(node: Node) -> bool:
    """Return True for a call whose order among such calls matters: random numbers, effects, operators of others."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return node.op == "call_function" and isinstance(target, HigherOrderOperator)
    return is_random(target) or schema_of(target).is_mutable or target.namespace not in ("aten", "prims", "prim")


def _levels(nodes: Iterable[Node], fragments: Mapping[Node, Fragment], free: set[Node]) -> dict[Node, int]:
    """Return the level of each node: even for ONNX Runtime, odd for PyTorch."""
    levels: dict[Node, int] = {}
    last_ordered = -1
    for node in nodes:
        if node.op in ("placeholder", "output") or node in free:
            continue
        if node.target is operator.getitem:
            levels[node] = levels[node.args[0]]  # type: ignore[index]
            continue
        odd = 0 if node in fragments else 1
        before = [levels[root] for argument in node.all_input_nodes for root in roots(argument, free) if root in levels]
        level = max((each if each % 2 == odd else each + 1 for each in before), default=-odd)
        if is_ordered(node):
            level = last_ordered = max(level, last_ordered)
        levels[node] = level
    return levels


def _groups(
    nodes: Iterable[Node], fragments: Mapping[Node, Fragment], free: set[Node], levels: Mapping[Node, int]
) -> Iterator[list[Node]]:
    groups: dict[tuple[int, int], list[Node]] = {}
    for position, node in enumerate(nodes, 1):
        if node in levels:
            alone = node in fragments and flops_of(node) >= _LARGE and not _is_read_in_segments(node, fragments, free)
            groups.setdefault((levels[node], position if alone else 0), []).append(node)
    for key in sorted(groups):
        yield groups[key]


def _is_read_in_segments(node: Node, fragments: Mapping[Node, Fragment], free: set[Node]) -> bool:
    return any(
        _is_read_in_segments(user, fragments, free) if user in free else user in fragments for user in node.users
    )


def _segment(members: list[Node], free: set[Node], output: Node) -> Segment:
    inside = set(members)
    ordered: dict[Node, None] = {}
    inputs: dict[Node, None] = {}

    def read(node: Node) -> None:
        if node in ordered or node in inputs:
            return
        if node not in inside and node not in free:
            inputs[node] = None
            return
        if node not in inside:
            for argument in node.all_input_nodes:
                read(argument)
            ordered[node] = None

    for node in members:
        for argument in node.all_input_nodes:
            read(argument)
        ordered[node] = None
    outputs = [node for node in members if not _several(node) and _is_read_outside(node, inside, free, output)]
    return Segment(tuple(ordered), tuple(inputs), tuple(outputs))


def _is_read_outside(node: Node, inside: set[Node], free: set[Node], output: Node) -> bool:
    """Return True if a node outside of the segment, or the graph's output, reads `node` or a view of it."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user is output or (user not in free and user not in inside):
                return True
            if user in free and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _with_views(steps: Iterable[Segment | TorchCall], free: set[Node], output: Node) -> Iterator[Segment | TorchCall]:
    """Yield the steps, each view or constant that PyTorch reads right before its first reader."""
    made: set[Node] = set()

    def needed(node: Node) -> Iterator[TorchCall]:
        if node in free and node not in made:
            made.add(node)
            for argument in node.all_input_nodes:
                yield from needed(argument)
            yield TorchCall(node)

    for step in steps:
        readers = step.inputs if isinstance(step, Segment) else step.node.all_input_nodes
        for argument in readers:
            yield from needed(argument)
        yield step
    for argument in output.all_input_nodes:
        yield from needed(argument)
