"""Clusters beyond those of ORT's table: what ORT does not know how to compute again, or sees no way to.

ORT walks from a stashed value towards the inputs and gives up where it meets an operator that is not in its list
(Relu), or one whose result nothing stashes (what makes the mask and the position bias of an attention, which all layers
share). Here the walk ends at such a value: it is then held for the backward, and the prediction counts it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection

import onnx

from ort_zero.ortmodule.compat.ort_kernels import BARRIER, RECOMPUTED
from ort_zero.ortmodule.onnx_edit.node_edits import with_nodes, with_values
from ort_zero.ortmodule.onnx_edit.topology import input_names, subgraphs

_FLAGS = frozenset(("IsNaN", "IsInf", "Not"))
"""Operators with one operand, and flags for a result, that are computed again where the operand is there anyhow."""
_ENDS = frozenset(
    ("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "HardSwish", "Softplus", "Softsign",
     "Sigmoid", "Tanh", "Erf", "Exp", "Softmax", "LogSoftmax", "BiasSoftmax")
)  # fmt: skip
"""Operators whose results a gradient reads, and that ORT does not compute again or not everywhere."""
_WITHIN = _ENDS | frozenset(
    ("MatMul", "FusedMatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Neg", "Where", "Cast", "Identity", "Transpose",
     "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand")
)  # fmt: skip
"""Operators that may stand on the way there. All give the same result whenever they run."""


def own_table(model: onnx.ModelProto) -> dict[str, tuple[str, int]]:
    """Return rows beyond ORT's table, in its form.

    Args:
        model: gradient graph that ORT has optimized, without copies.
    """
    types = {info.name: info.type.tensor_type for info in model.graph.value_info}
    savings: dict[str, list[str]] = defaultdict(list)
    for place in _places(model):
        value = place[-1].output[0]
        kind = types.get(value)
        dims = [dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim] if kind is not None else ["0"]
        width = 1 if place[-1].op_type in _FLAGS else 4
        savings[f"{_key(place)}:-1"].append(f"({'*'.join(dims)}) * {width}")
    return {row: (" + ".join(found), len(found)) for row, found in savings.items()}


def with_own_copies(model: onnx.ModelProto, clusters: Collection[str]) -> onnx.ModelProto:
    """Return `model` with copies of our own clusters among `clusters`, behind all nodes, which its backward reads.

    Args:
        model: gradient graph in which ORT may have made copies.
        clusters: keys of clusters, such as ``"FusedMatMul+Relu+:1"``.
    """
    there = {node.name for node in model.graph.node}
    copied = {
        node.name: node
        for place in _places(model)
        if _key(place) in clusters and place[-1].name + RECOMPUTED not in there
        for node in place
        if node.name + RECOMPUTED not in there
    }
    if not copied:
        return model
    again = {value: value + RECOMPUTED for node in copied.values() for value in node.output if value}
    made = {value for node in model.graph.node for value in node.output}
    nodes, backward = [], False
    for node in model.graph.node:
        if backward and any(name in again for name in node.input):
            node = with_values(node, inputs=[again.get(name, name) for name in node.input])
        backward = backward or node.op_type == BARRIER
        nodes.append(node)
    for node in copied.values():
        reads = [name + RECOMPUTED if name in again or name + RECOMPUTED in made else name for name in node.input]
        copy = with_values(node, reads, [value and again[value] for value in node.output])
        copy.name += RECOMPUTED
        nodes.append(copy)
    return with_nodes(model, nodes)


def read_late(model: onnx.ModelProto) -> set[str]:
    """Return what the barrier, and nodes behind it, read; copies stand there only for somebody who reads them."""
    found: set[str] = set()
    for node in itertools.dropwhile(lambda node: node.op_type != BARRIER, model.graph.node):
        if not node.name.endswith(RECOMPUTED):
            found.update(node.input)
    return found


def _places(model: onnx.ModelProto) -> list[list[onnx.NodeProto]]:
    """Return the nodes of each place where a cluster of ours can be computed again, in the order of the graph.

    The last of them makes the stashed value.
    """
    # what ORT computes again is stashed in the graph without copies
    late = {name.removesuffix(RECOMPUTED) for name in read_late(model)}
    forward = list(itertools.takewhile(lambda node: node.op_type != BARRIER, model.graph.node))
    forward = [node for node in forward if not node.name.endswith(RECOMPUTED)]
    returned = {value.name for value in model.graph.output}
    barrier = next((node for node in model.graph.node if node.op_type == BARRIER), None)
    if barrier is not None:
        returned.update(barrier.input)
    walk = _Walk(forward, late)
    places = []
    for node in forward:
        if not node.output or node.output[0] not in late:
            continue
        if node.op_type in _FLAGS and not node.domain and node.input[0] in late:
            places.append([node])
        elif node.op_type in _ENDS | {"Dropout"} and node.output[0] not in returned:
            place = walk.nodes_of(node)
            if any(one.op_type in _ENDS for one in place):  # ORT finds the other Dropouts
                places.append(place)
    return places


class _Walk:
    """Finds what has to run again for a stashed value.

    Args:
        forward: nodes before the barrier, without copies.
        late: values that the backward reads.
    """

    def __init__(self, forward: list[onnx.NodeProto], late: Collection[str]):
        self._late = late
        self._index = {id(node): i for i, node in enumerate(forward)}
        self._maker = {value: node for node in forward for value in node.output if value}
        self._readers: dict[str, set[int]] = defaultdict(set)
        for node in forward:
            if node.op_type == "Shape":
                continue  # it has run long ago, and holds nothing
            for name in input_names(node):
                self._readers[name].add(id(node))

    def nodes_of(self, end: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes, in the order of the graph, that compute the first result of `end` from what is held.

        Held is what the backward reads anyhow, and what nodes elsewhere read as well.
        """
        taken = {id(end): end}
        waiting = list(end.input)
        while waiting:
            name = waiting.pop()
            node = self._maker.get(name)
            if node is None or name in self._late or id(node) in taken or not self._readers[name] <= taken.keys():
                continue
            if node.op_type not in _WITHIN or len(node.output) != 1 or any(subgraphs(node)):
                continue
            taken[id(node)] = node
            waiting += node.input
        return sorted(taken.values(), key=lambda node: self._index[id(node)])


def _key(place: list[onnx.NodeProto]) -> str:
    """Return the name of the operators of a place in ORT's notation, with the kind: all are computed again."""
    return f"{''.join(f'{node.op_type}+' for node in place)}:1"
