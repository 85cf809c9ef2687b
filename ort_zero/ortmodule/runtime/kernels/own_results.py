"""Gives results of a gradient graph memory of their own, where ONNX Runtime would write something else into theirs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ort_zero.ortmodule.compat.ort_kernels import BARRIER, FROM_TORCH, NEW_MEMORY, ONLY_READ
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node, replace_field

_SUFFIX = "_returned"


def copy_shared_results(model: onnx.ModelProto) -> int:
    """Let PyTorch copy each result whose memory is, or becomes, that of another value; changes `model`.

    The caller may read a result for as long as it likes, also after the backward, or when there is none. ONNX
    Runtime gives a value that is made in place the memory of a value that it frees itself, and lets nodes of the
    backward write into what they are the last to read; it makes an exception only for values that the caller alone
    reads.

    Args:
        model: a gradient graph; any other is left as it is.

    Returns:
        How many results are copied.
    """
    nodes = list(model.graph.node)
    barrier = next((node for node in nodes if node.op_type == BARRIER), None)
    if barrier is None:
        return 0
    values = GraphValues(model, "")
    before = _leading_to(barrier, values.producers)
    copies: dict[str, onnx.NodeProto] = {}
    for i, name in enumerate(barrier.input):
        source = _without_identities(name, values.producers)
        if source not in values.producers or _has_own_memory(source, barrier, values, before):
            continue
        copy = f"{name}{_SUFFIX}"
        values.declare(copy, values.element_type(name) or values.element_type(source), values.shape(name))
        # an Identity would not do: ORT's optimizer leaves it out
        copies[copy] = aten_node("aten::clone", [source, ""], [copy], copy)
        barrier.input[i] = copy
    if copies:
        place = next(i for i, node in enumerate(nodes) if node is barrier)
        replace_field(model.graph, "node", (*nodes[:place], *copies.values(), *nodes[place:]))
    return len(copies)


def _has_own_memory(source: str, barrier: onnx.NodeProto, values: GraphValues, before: set[int]) -> bool:
    """Return whether nobody but the caller frees or changes the memory of the value `source`."""
    readers = _readers(source, values)
    others = [node for node in readers if node is not barrier]
    if not others:
        return True
    if values.producers[source].op_type not in NEW_MEMORY | FROM_TORCH:
        return False
    return all(id(node) in before or node.op_type in NEW_MEMORY | FROM_TORCH | ONLY_READ for node in others)


def _readers(name: str, values: GraphValues) -> list[onnx.NodeProto]:
    """Return the nodes that read a value, also behind nodes that hand it on."""
    found = []
    for node in values.readers.get(name, []):
        found += _readers(node.output[0], values) if node.op_type == "Identity" else [node]
    return found


def _without_identities(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    while name in producers and producers[name].op_type == "Identity":
        name = producers[name].input[0]
    return name


def _leading_to(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> set[int]:
    """Return the ``id()`` of each node that `node` depends on: those that have run before it."""
    found: set[int] = set()
    left = [node]
    while left:
        for name in left.pop().input:
            producer = producers.get(name)
            if producer is not None and id(producer) not in found:
                found.add(id(producer))
                left.append(producer)
    return found
