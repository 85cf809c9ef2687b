"""Finds the checkpointed blocks of a training graph by the marks of the trace, and takes the marks out.

A block is what one call of torch's activation checkpointing has computed: all that depends on a marked argument and
that a marked result depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ort_zero.ortmodule.onnx_edit.marks import function_of, numbers_of, passed, without_passing
from ort_zero.ortmodule.onnx_edit.node_edits import replace_field
from ort_zero.ortmodule.onnx_edit.topology import (
    input_names,
    node_key,
    nodes_reached_from,
    output_names,
    topological_order,
)

MARK = "ort_zero.ortmodule.runtime.export.checkpoint_marks.BlockMark"
"""Qualified name of the autograd Function that marks what a block reads (second number 0) and returns (1)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A checkpointed block of a graph."""

    number: int
    """Number of the block in the trace, from 0."""
    nodes: frozenset[str]
    """Keys (:func:`~ort_zero.ortmodule.onnx_edit.topology.node_key`) of the nodes that are part of the block."""
    arguments: frozenset[str]
    """Names of the values that the block was given."""
    gradients: tuple[str, ...]
    """Names of the gradients of the block's results: once they exist, its backward begins."""


@dataclass(slots=True)
class _Marks:
    """The marks of one block, by the nodes' indices in the list of nodes."""

    arguments: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    """Names of what flows back to the results."""


def has_marks(model: onnx.ModelProto) -> bool:
    """Return whether the module of a graph has called activation checkpointing while it was traced."""
    return any(function_of(node, (MARK,)) is not None for node in model.graph.node)


def take_blocks_out(model: onnx.ModelProto) -> list[Block]:
    """Return the blocks of a training graph, whose marks are taken out of `model`."""
    graph = model.graph
    nodes = topological_order(graph)
    passing = {id(node) for node in nodes if function_of(node, (MARK,)) is not None}
    if not passing:
        return []
    found = {number: (marks, _nodes_of(nodes, marks, passing)) for number, marks in _marks(nodes, passing).items()}
    arguments = {number: [passed(nodes[i])[0] for i in marks.arguments] for number, (marks, _) in found.items()}
    left, same = without_passing(nodes, passing, {output.name for output in graph.output})
    replace_field(graph, "node", left)

    def resolved(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(same.get(name, name) for name in names if name))

    return [
        Block(number, inside, frozenset(resolved(arguments[number])), resolved(marks.gradients))
        for number, (marks, inside) in sorted(found.items())
    ]


def _marks(nodes: Sequence[onnx.NodeProto], passing: set[int]) -> dict[int, _Marks]:
    """Return the marks of each block by its number."""
    found: dict[int, _Marks] = {}
    result_of: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if id(node) not in passing:
            continue
        if node.op_type == "PythonOpGrad":
            number = result_of.get(node.input[0])
            if number is not None:
                found[number].gradients.append(passed(node)[0])
            continue
        number, is_result = numbers_of(node)
        marks = found.setdefault(number, _Marks())
        (marks.results if is_result else marks.arguments).append(i)
        if is_result:
            result_of[node.output[0]] = number
    return found


def _nodes_of(nodes: Sequence[onnx.NodeProto], marks: _Marks, passing: set[int]) -> frozenset[str]:
    """Return the keys of the nodes between the marks of one block, without marks.

    A mark on an argument whose tensor the block itself has computed counts as a part of the block.
    """
    results = [passed(nodes[i])[0] for i in marks.results]
    needed = {id(node) for node in nodes_reached_from(nodes, results)}
    starts = set(marks.arguments)
    depending: set[str] = set()
    found = set()
    for i, node in enumerate(nodes):
        if i not in starts and (id(node) not in needed or depending.isdisjoint(input_names(node))):
            continue
        depending.update(output_names(node))
        if id(node) not in passing:
            found.add(node_key(node))
    return frozenset(found)
