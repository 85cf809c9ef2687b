"""Finds and takes out marks: PythonOp nodes that pass a tensor on and tell what it was in the module."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import helper

from ort_zero.ortmodule.onnx_edit.node_edits import rename_inputs


def function_of(node: onnx.NodeProto, names: Collection[str]) -> str | None:
    """Return which of the autograd Functions `names` a node runs, forward or backward; None if it is another node.

    Args:
        node: any node.
        names: qualified names, ``module.Class``.
    """
    if node.op_type not in ("PythonOp", "PythonOpGrad"):
        return None
    called = [a.s.decode() for a in node.attribute if a.name in ("func_name", "name")]
    return next((name for name in names if any(one.endswith(name) for one in called)), None)


def numbers_of(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the integers that a mark was given beside its tensor."""
    return next((tuple(a.ints) for a in node.attribute if a.name == "input_int_scalars"), ())


def passed(node: onnx.NodeProto) -> tuple[str, str]:
    """Return what a mark, or its node in the backward, reads and under which name it passes that on."""
    if node.op_type == "PythonOpGrad":
        return node.input[1], node.output[0]
    return node.input[0], node.output[1]


def without_passing(
    nodes: Iterable[onnx.NodeProto], passing: Collection[int], outputs: Collection[str]
) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """Take marks out: what reads them reads what they have read.

    Args:
        nodes: in a topological order; those that stay are changed.
        passing: ``id()`` of each mark and of its node in the backward.
        outputs: names of the graph's outputs, which stay.

    Returns:
        The nodes that stay, and for each name that a mark gave to a value the value's own name.
    """
    left: list[onnx.NodeProto] = []
    same: dict[str, str] = {}
    for node in nodes:
        rename_inputs(node, same)
        if id(node) not in passing:
            left.append(node)
            continue
        read, made = passed(node)
        if made in outputs:
            left.append(helper.make_node("Identity", [read], [made], f"{node.name}_passed"))
        else:
            same[made] = read
    return left, same
