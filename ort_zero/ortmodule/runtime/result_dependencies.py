"""Knows which results of a graph depend on what: for backwards that come from some of the results only.

Everything is read from ONNX graphs, without a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx

from ort_zero.ortmodule.compat.ort_kernels import BARRIER
from ort_zero.ortmodule.compat.torch_onnx import stops_gradient
from ort_zero.ortmodule.runtime.fused_loss.rewrite import ReturnedLogits

_WITHOUT_SAVED = frozenset({"Identity", "Cast", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Constant"})
"""ONNX operators for whose gradient PyTorch saves no tensor: several backwards may go through them."""
_SHAPES = frozenset({"Shape", "Size"})
_VIEWS = frozenset({"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"})
"""ONNX operators whose result ORT keeps in the memory of the first input."""
_WITHOUT_GRADIENT = _SHAPES | frozenset(
    "ArgMax ArgMin Equal Greater GreaterOrEqual Less LessOrEqual NonZero Not And Or Xor IsNaN IsInf".split()
)
"""ONNX operators whose results are no floating-point numbers."""


class ResultDependencies:
    """Which results of one exported graph share nodes, and which of its inputs a backward from each of them reaches.

    Args:
        graph: the exported graph, without gradients.
        wanted: names of its inputs that want gradients.
        logits: where the graph that runs has other results than `graph`; None where it has the same.
    """

    def __init__(self, graph: onnx.GraphProto, wanted: Collection[str], logits: ReturnedLogits | None):
        self.groups = _groups(graph, wanted)
        """A number for each result of the exported graph: those with different ones share no node with saved
        tensors."""
        self._logits = logits
        self._wanted = frozenset(wanted)
        self._reached = _inputs_behind(graph, wanted)
        self._left_out: dict[tuple[int, ...], frozenset[str]] = {}

    def groups_of(self, gradients: Sequence[object]) -> set[int]:
        """Return the groups of the results that a backward comes from.

        Args:
            gradients: of the results of a run, None where the backward has not come from.
        """
        return {self.groups[i] for i in self._used(gradients)}

    def left_out(self, gradients: Sequence[object]) -> frozenset[str]:
        """Return the names of the graph inputs to which a backward does not lead.

        Args:
            gradients: of the results of a run, None where the backward has not come from.
        """
        used = self._used(gradients)
        if used not in self._left_out:
            self._left_out[used] = self._wanted.difference(*(self._reached[i] for i in used))
        return self._left_out[used]

    def _used(self, gradients: Sequence[object]) -> tuple[int, ...]:
        """Return the indices, in the exported graph, of the results with a gradient."""
        used = (i for i, gradient in enumerate(gradients) if gradient is not None)
        if self._logits is None:
            return tuple(i for i in used if i < len(self.groups))
        first, count, index = self._logits.first, self._logits.count, self._logits.index
        exported = {i if i < first else index if i < first + count else i - count for i in used}
        return tuple(sorted(i for i in exported if i < len(self.groups)))


def inputs_of_backward(graph: onnx.GraphProto, weights: Collection[str]) -> frozenset[str]:
    """Return the names of the inputs of a gradient graph whose values its backward reads.

    Args:
        graph: the graph that runs, the forward and the backward of it.
        weights: names of inputs of which nodes that run in PyTorch keep no copies for their backward.
    """
    producers = {name: node for node in graph.node for name in node.output if name}
    barrier = next((node for node in graph.node if node.op_type == BARRIER), None)
    if barrier is None:
        return frozenset()
    forward = _behind(barrier.input, producers)
    outputs = (output.name for output in graph.output)
    names = {given.name for given in graph.input}
    read: set[str] = set()
    for node in _behind(outputs, producers).values():
        if node.op_type in _SHAPES:
            continue
        if id(node) in forward:
            read.update(set(weights).intersection(node.input) if node.op_type == "PythonOp" else ())
            continue
        for name in _read_by(node):
            while name in producers and producers[name].op_type in _VIEWS:
                name = producers[name].input[0]
            read.add(name)
    return frozenset(read & names)


def _behind(names: Iterable[str], producers: dict[str, onnx.NodeProto]) -> dict[int, onnx.NodeProto]:
    """Return the nodes that compute the values `names`, by ``id()``."""
    found: dict[int, onnx.NodeProto] = {}
    waiting = list(names)
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and id(node) not in found:
            found[id(node)] = node
            waiting += _read_by(node)
    return found


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node reads, those of its branches and loops among them."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
            for inner in graph.node:
                yield from _read_by(inner)


def _stops(node: onnx.NodeProto) -> bool:
    """Return whether no gradient goes through a node."""
    return node.op_type in _WITHOUT_GRADIENT or stops_gradient(node)


def _inputs_behind(graph: onnx.GraphProto, wanted: Collection[str]) -> list[frozenset[str]]:
    """Return, for each result, those inputs among `wanted` that a backward from it leads to."""
    bits = {name: 1 << i for i, name in enumerate(wanted)}
    reached = dict(bits)  # by the name of each value
    grows = True
    while grows:  # once more than the nodes need in the order in which they run
        grows = False
        for node in graph.node:
            mask = 0
            if not _stops(node):
                for name in _read_by(node):
                    mask |= reached.get(name, 0)
            for name in filter(None, node.output):  # a result that is left out has no name
                before = reached.get(name, 0)
                grows |= before | mask != before
                reached[name] = before | mask
    masks = [reached.get(output.name, 0) for output in graph.output]
    return [frozenset(name for name, bit in bits.items() if mask & bit) for mask in masks]


def _groups(graph: onnx.GraphProto, wanted: Collection[str]) -> list[int]:
    reached = set(wanted)
    producers: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        if not reached.isdisjoint(node.input):
            reached.update(node.output)
            producers.update(dict.fromkeys(node.output, i))
    group_of: dict[int, int] = {}  # of nodes
    groups = list(range(len(graph.output)))
    for at, output in enumerate(graph.output):
        waiting, seen = [output.name], set()
        while waiting:
            number = producers.get(waiting.pop())
            if number is None or number in seen:
                continue
            seen.add(number)
            node = graph.node[number]
            waiting += node.input
            if node.op_type in _WITHOUT_SAVED:
                continue
            known = group_of.setdefault(number, groups[at])
            if known != groups[at]:
                groups = [known if group == groups[at] else group for group in groups]
                group_of = {n: groups[group] for n, group in group_of.items()}
    return groups
