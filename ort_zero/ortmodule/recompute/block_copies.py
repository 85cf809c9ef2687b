"""Edits a training graph so that its backward computes checkpointed blocks again: a pure function.

Of what a block has computed, the forward then keeps what others read, and what cannot or must not be computed twice:
the masks of Dropout, other random numbers, and the results of nodes with effects. The backward of the block reads
copies of the rest, which begin at the block's arguments. Every value that a copy takes from the forward goes through a
*gate*: a Reshape to its own shape, which is an alias in ORT, where that shape is computed from the gradient of the
block's result too. So a copy depends on the backward: it cannot run
earlier, and ZeRO-3 gathers its weights in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ort_zero.ortmodule.compat.ort_kernels import BARRIER, EFFECTS, RECOMPUTED
from ort_zero.ortmodule.onnx_edit.marks import function_of, passed
from ort_zero.ortmodule.onnx_edit.node_edits import copied, rename_inputs, with_nodes, with_values
from ort_zero.ortmodule.onnx_edit.topology import (
    input_names,
    is_random,
    node_key,
    nodes_reached_from,
    output_names,
    producers,
    subgraphs,
    topological_order,
    value_types,
)
from ort_zero.ortmodule.recompute.checkpointed_blocks import Block

_SHAPES = frozenset(("Shape", "Size"))
_ZERO = "ort_zero_zero"


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """A training graph whose backward computes blocks again."""

    model: onnx.ModelProto
    nodes: dict[int, int]
    """Number of copied nodes for each block of which anything is computed again, by the block's number."""


def with_block_copies(
    model: onnx.ModelProto,
    blocks: Sequence[Block],
    *,
    weights: Collection[str] = (),
    is_pure: Callable[[onnx.NodeProto], bool] = lambda node: True,
    passing: Collection[str] = (),
) -> BlockCopies:
    """Return a copy of the graph whose backward computes `blocks` again.

    Args:
        model: training graph that ORT has optimized, without marks.
        blocks: of that graph.
        weights: names of the graph inputs that ZeRO-3 partitions: a copy reads them, and what is computed from them
            alone, without a gate.
        is_pure: whether a node of PyTorch's computes the same whenever it runs, without effects.
        passing: names of autograd Functions whose nodes only pass their first input on.
    """
    edit = _Edit(model, blocks, weights, is_pure, passing)
    for node in edit.late:
        edit.read_copies(node)
    result = with_nodes(model, edit.sequence())
    graph = result.graph
    if edit.gates:
        graph.initializer.append(numpy_helper.from_array(np.zeros(1, dtype=np.int64), _ZERO))
    graph.value_info.extend(edit.infos)
    ordered = topological_order(graph, list(graph.node))
    return BlockCopies(with_nodes(result, ordered), edit.copied_nodes)


class _Edit:
    """The copies of one graph, made as nodes of the backward ask for them."""

    def __init__(
        self,
        model: onnx.ModelProto,
        blocks: Sequence[Block],
        weights: Collection[str],
        is_pure: Callable[[onnx.NodeProto], bool],
        passing: Collection[str],
    ):
        graph = model.graph
        self._nodes = [copied(node) for node in topological_order(graph)]
        self._made_by = producers(self._nodes)
        self._types = value_types(graph)
        self._is_pure = is_pure
        self._passed: dict[str, str] = {
            after: before
            for before, after in (
                passed(node)
                for node in self._nodes
                if node.op_type == "PythonOp" and function_of(node, passing) is not None
            )
        }
        """What is passed on under another name, by that name."""
        self._barrier = next((i for i, node in enumerate(self._nodes) if node.op_type == BARRIER), len(self._nodes))
        # a block whose results get no gradient has no backward
        self._block_of = {key: block for block in blocks if block.gradients for key in block.nodes}
        early = nodes_reached_from(self._nodes, (), self._nodes[self._barrier : self._barrier + 1])
        self._early = {id(node) for node in early}
        self._static = _static_values(graph, self._nodes, weights)
        self._stays = self._values_that_stay()
        self._copies: dict[str, onnx.NodeProto] = {}
        """Copies by the key of what they are copies of."""
        self.gates: dict[tuple[str, int], str] = {}
        """Name behind the gate, by the value's name and the block's number."""
        self._nodes_of_gates: list[onnx.NodeProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        """Types of the values behind gates."""
        self.copied_nodes: dict[int, int] = {}
        self._shapes: list[onnx.NodeProto] = []

    @property
    def late(self) -> list[onnx.NodeProto]:
        """The nodes that the results of the forward do not need."""
        return [node for node in self._nodes if id(node) not in self._early]

    def read_copies(self, node: onnx.NodeProto) -> None:
        """Let a node of the backward read copies; one that wants a shape alone reads it in the forward."""
        again = {name: block for name in input_names(node) if (block := self._recomputed(name)) is not None}
        if again and node.op_type in _SHAPES:
            self._shapes.append(node)
        else:
            rename_inputs(node, {name: self._copy(name, block) for name, block in again.items()})

    def sequence(self) -> list[onnx.NodeProto]:
        """Return all nodes: the forward, the backward, what only seems to be part of the forward, the copies.

        In a topological order of these, a node before which others are not needed stands where it is.
        """
        shapes = {id(node) for node in self._shapes}
        before, behind = self._nodes[: self._barrier], self._nodes[self._barrier :]
        forward = [node for node in before if id(node) in self._early]
        waiting = [node for node in before if id(node) not in self._early and id(node) not in shapes]
        backward = [node for node in behind if id(node) not in shapes]
        return [*forward, *self._shapes, *backward, *waiting, *self._nodes_of_gates, *self._copies.values()]

    # -- what is computed again ------------------------------------------------------------------------------------

    def _values_that_stay(self) -> set[str]:
        """Return the values of blocks that the forward keeps, if the backward reads them."""
        found: set[str] = set()
        for node in self._nodes:
            mine = self._block_of.get(node_key(node))
            if mine is not None:
                if not self._may_copy(node):
                    found.update(output_names(node))
                elif node.op_type == "Dropout":
                    found.update(node.output[1:])
            if id(node) in self._early:
                for name in map(self._through, input_names(node)):
                    made_by = self._made_by.get(name)
                    if made_by is not None and self._block_of.get(node_key(made_by)) not in (None, mine):
                        found.add(name)
        return found

    def _may_copy(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Dropout" and not node.domain:
            return len(node.output) > 1 and bool(node.output[1])  # the copy takes the mask
        if is_random(node) or node.op_type in EFFECTS or any(True for _ in subgraphs(node)):
            return False
        return node.op_type != "ATen" or self._is_pure(node)

    def _recomputed(self, name: str) -> Block | None:
        """Return the block that computes a value again for the backward; None for a value that stays."""
        name = self._through(name)
        node = self._made_by.get(name)
        if node is None or name in self._stays:
            return None
        return self._block_of.get(node_key(node))

    def _through(self, name: str) -> str:
        """Return the name of a value before nodes passed it on."""
        while name in self._passed:
            name = self._passed[name]
        return name

    def _copy(self, name: str, block: Block) -> str:
        """Return the name of the copy of a value, and make the nodes that compute it."""
        name = self._through(name)
        todo = [self._made_by[name]]
        while todo:
            node = todo.pop()
            key = node_key(node)
            if key in self._copies:
                continue
            names = {}
            for read in input_names(node):
                if self._recomputed(read) is not None:
                    names[read] = self._through(read) + RECOMPUTED
                    todo.append(self._made_by[self._through(read)])
                else:
                    names[read] = self._gated(read, block)
            self._copies[key] = _copy_of(node, names)
            self.copied_nodes[block.number] = self.copied_nodes.get(block.number, 0) + 1
        return name + RECOMPUTED

    def _gated(self, name: str, block: Block) -> str:
        """Return the name of a value of the forward that exists when the backward of the block begins."""
        if name not in block.arguments and (name in self._static or name not in self._made_by):
            return name
        if (name, block.number) not in self.gates:
            gated = f"{name}__block_{block.number}{RECOMPUTED}"
            self.gates[name, block.number] = gated
            shape, whole = f"{gated}_shape", f"{gated}_whole"
            parts = [self._begins(block, gradient) for gradient in block.gradients]
            self._nodes_of_gates += [
                helper.make_node("Shape", [name], [shape], f"{shape}{RECOMPUTED}"),
                helper.make_node("Concat", [shape, *parts], [whole], f"{whole}{RECOMPUTED}", axis=0),
                helper.make_node("Reshape", [name, whole], [gated], gated),
            ]
            if name in self._types:
                info = onnx.ValueInfoProto(name=gated)
                info.type.tensor_type.CopyFrom(self._types[name])
                self.infos.append(info)
        return self.gates[name, block.number]

    def _begins(self, block: Block, gradient: str) -> str:
        """Return the name of a list of no numbers that exists once `gradient` does."""
        key = (gradient, block.number)
        if key not in self.gates:
            nothing = f"{gradient}__begins_{block.number}{RECOMPUTED}"
            self.gates[key] = nothing
            shape = f"{nothing}_shape"
            self._nodes_of_gates += [
                helper.make_node("Shape", [gradient], [shape], f"{shape}{RECOMPUTED}"),
                helper.make_node("Slice", [shape, _ZERO, _ZERO], [nothing], nothing),
            ]
        return self.gates[key]


def _copy_of(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    """Return the node that computes again what `node` has computed, from the values called `names`."""
    outputs = [name and name + RECOMPUTED for name in node.output]
    name = (node.name or node_key(node)) + RECOMPUTED
    if node.op_type == "Dropout":
        inputs = [names.get(read, read) for read in node.input]
        inputs = [inputs[0], node.output[1], *inputs[1:]]
        return helper.make_node("DropoutGrad", inputs, outputs[:1], name, domain="com.microsoft")
    copy = with_values(node, outputs=outputs)
    copy.name = name
    rename_inputs(copy, names)
    return copy


def _static_values(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], weights: Collection[str]) -> frozenset[str]:
    """Return the values that are computed from `weights` and constants alone."""
    found = {initializer.name for initializer in graph.initializer} | set(weights)
    for node in nodes:
        if node.op_type not in EFFECTS and not is_random(node) and found.issuperset(input_names(node)):
            found.update(output_names(node))
    return frozenset(found)
