"""Edits of the ONNX model: the recomputations that are wanted, in the order in which they are to run."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from ort_zero.ortmodule.compat.ort_kernels import BACKWARD, BARRIER, RECOMPUTED
from ort_zero.ortmodule.onnx_edit.node_edits import copied, with_nodes, with_values
from ort_zero.ortmodule.onnx_edit.topology import input_names, topological_order
from ort_zero.ortmodule.recompute.own_clusters import read_late, with_own_copies

if TYPE_CHECKING:
    from ort_zero.ortmodule.compat.ortmodule import GraphInfo, Manager, Recompute


def optimized(manager: Manager, model: onnx.ModelProto, info: GraphInfo, plan: Recompute | None = None) -> tuple:
    """Return the agent of a session, and the model that it runs after ORT's changes.

    Args:
        manager: manager of the training mode.
        model: gradient graph.
        info: what ORT knows of it.
        plan: what ORT is to compute again; `model` has been optimized before then.
    """
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as folder:
        target = Path(folder) / "model.onnx"
        ready = model.SerializeToString() if plan is not None else None
        agent = manager.create_session(model, info, optimized=ready, write_to=str(target), recompute=plan)
        return agent, onnx.load(target)


def with_copies(
    manager: Manager, model: onnx.ModelProto, info: GraphInfo, clusters: Sequence[str], probe: str
) -> onnx.ModelProto:
    """Return `model` in which ORT has applied every place of `clusters`.

    Args:
        manager: manager of the training mode.
        model: gradient graph that ORT has optimized.
        info: what ORT knows of it.
        clusters: keys of the clusters, such as ``"FastGelu+:1"``.
        probe: see :class:`ort_zero.ortmodule.compat.ortmodule.Recompute`.
    """
    from ort_zero.ortmodule.compat.ortmodule import Recompute

    with tempfile.NamedTemporaryFile("w", prefix="ort_zero-", suffix=".json") as file:
        json.dump([f"{key}:-1" for key in clusters], file)
        file.flush()
        _, changed = optimized(manager, model, info, Recompute(file.name, probe))
    names = [node.name for node in model.graph.node]
    return in_given_order(_with_kept_masks(with_own_copies(in_given_order(changed, names), clusters)), names)


def _with_kept_masks(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` in which copies whose results the backward reads take the masks that the forward has drawn.

    A mask is a byte an element, and drawing one takes five times as long as using it. Copies of which the backward
    reads the mask alone are left as they are.
    """
    late = read_late(model)
    drawing = [node for node in model.graph.node if node.op_type == "Dropout" and not node.domain]
    random = {node.name + RECOMPUTED: node for node in drawing}
    copies = [
        node for node in model.graph.node
        if node.name in random and len(node.output) > 1 and node.output[0] in late
    ]  # fmt: skip
    kept = {node.output[1]: random[node.name].output[1] for node in copies}
    copied = {node.name for node in copies}
    nodes = []
    for node in model.graph.node:
        if node.name in copied:
            inputs = [node.input[0], random[node.name].output[1], *node.input[1:]]
            made = helper.make_node("DropoutGrad", inputs, node.output[:1], node.name, domain="com.microsoft")
            nodes.append(made)
        elif any(name in kept for name in node.input):
            nodes.append(with_values(node, inputs=[kept.get(name, name) for name in node.input]))
        else:
            nodes.append(node)
    return with_nodes(model, nodes)


def in_given_order(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return `model` with its nodes in the order of `names`, the others right before the first that reads them.

    What stands before the barrier only because it can run early, and reads what is computed again, comes behind it: the
    forward would have to compute everything twice for it.
    """
    place = {name: float(i) for i, name in enumerate(names)}

    def ordered() -> list[onnx.NodeProto]:
        nodes = sorted(model.graph.node, key=lambda node: place.get(node.name, len(place)))
        return topological_order(model.graph, nodes)

    nodes = ordered()
    barrier = next((node for node in nodes if node.op_type == BARRIER), None)
    late = _of_the_backward(nodes, barrier) if barrier is not None else []
    if late and barrier is not None:
        place |= dict.fromkeys(late, place[barrier.name] + 0.5)
        nodes = ordered()
    return with_nodes(model, nodes)


def _of_the_backward(nodes: Sequence[onnx.NodeProto], barrier: onnx.NodeProto) -> list[str]:
    """Return the names of the nodes, copies apart, that read what is computed again and that `barrier` does not need.

    Args:
        nodes: in an order in which they can run.
        barrier: one of them.
    """
    needed = set(barrier.input)
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(input_names(node))
    again: set[str] = set()
    names = []
    for node in itertools.takewhile(lambda node: node is not barrier, nodes):
        copy = node.name.endswith(RECOMPUTED)
        if copy or not again.isdisjoint(input_names(node)):
            again.update(node.output)
            if not copy and needed.isdisjoint(node.output):
                names.append(node.name)
    return names


def only_copies(model: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """Return `model` in which only the copies named in `kept` are left; what read others reads the originals."""
    dropped = [n for n in model.graph.node if n.name.endswith(RECOMPUTED) and n.name not in kept]
    back = {value: value.removesuffix(RECOMPUTED) for node in dropped for value in node.output if value}
    names = {node.name for node in dropped}
    nodes = []
    for node in model.graph.node:
        if node.name in names:
            continue
        if any(name in back for name in node.input):
            node = with_values(node, inputs=[back.get(name, name) for name in node.input])
        nodes.append(node)
    return with_nodes(model, nodes)


def ordered(model: onnx.ModelProto, order: Sequence[int]) -> onnx.ModelProto:
    """Return `model` with its nodes in the order in which they are to run, marked so that ORT keeps to it.

    Sessions with priorities run a node of the forward before one of the backward whatever their places.

    Args:
        model: training graph.
        order: places of its nodes.
    """
    nodes, backward = [], False
    for i in order:
        node = copied(model.graph.node[i])
        marked = [attribute for attribute in node.attribute if attribute.name != BACKWARD]
        node.ClearField("attribute")
        node.attribute.extend(marked)
        if backward:
            node.attribute.append(helper.make_attribute(BACKWARD, 1))
        backward = backward or node.op_type == BARRIER
        nodes.append(node)
    return with_nodes(model, nodes)
