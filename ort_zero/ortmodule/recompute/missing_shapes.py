"""Shapes of values of which a graph says nothing: nodes that ORT's optimizer puts in have no declared results.

T5's attention masks are such values: ORT pushes Transposes through what computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ort_zero.ortmodule.onnx_edit.graph_values import attributes

_COMPARED = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"))
_BROADCAST = _COMPARED | frozenset(("Where", "Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod", "Sum"))
"""Operators whose result has the shape that their inputs have together."""
_SAME = frozenset(
    ("Identity", "Neg", "Abs", "Sqrt", "Exp", "Log", "Not", "IsNaN", "IsInf", "Cast", "Relu", "Tanh", "Sigmoid", "Erf",
     "Sin", "Cos", "Softmax", "CumSum", "Clip", "Ceil", "Floor", "Round", "Reciprocal")
)  # fmt: skip
"""Operators whose result has the shape of their first input."""
_REDUCTIONS = frozenset(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"))
"""Operators whose result has one element along some axes, or lacks these."""
_FLAGS = _COMPARED | frozenset(("Not", "IsNaN", "IsInf"))
"""Operators whose result consists of truth values."""

Shape = tuple[int, ...]


def constants_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Return the small initializers of a graph of integers, such as axes."""
    whole = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    small = [tensor for tensor in graph.initializer if tensor.data_type in whole and np.prod(tensor.dims) <= 8]
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in small}


def shape_of_result(
    node: onnx.NodeProto, shape: Callable[[str], Shape | None], constants: Mapping[str, np.ndarray]
) -> Shape | None:
    """Return the shape of the first result of a node; None if it does not follow from those of its inputs.

    Args:
        node: any node.
        shape: returns the shape of a value, None if it is not known.
        constants: see :func:`constants_of`.
    """
    if node.domain or not node.input:
        return None
    first = shape(node.input[0])
    if node.op_type in _SAME:
        return first
    if node.op_type in _BROADCAST:
        shapes = [found for name in node.input if (found := shape(name)) is not None]
        try:
            return np.broadcast_shapes(*shapes) if len(shapes) == len(node.input) else None
        except ValueError:
            return None
    if first is None:
        return None
    if node.op_type == "Transpose":
        order = attributes(node).get("perm", range(len(first))[::-1])
        return tuple(first[axis] for axis in order)
    if node.op_type in ("Unsqueeze", "Squeeze"):
        axes = constants.get(node.input[1]) if len(node.input) > 1 else None
        return None if axes is None else _with_axes(first, axes.reshape(-1).tolist(), node.op_type == "Unsqueeze")
    return _reduced(node, first, constants) if node.op_type in _REDUCTIONS else None


def type_of_result(node: onnx.NodeProto, element_type: Callable[[str], int]) -> int:
    """Return ONNX's number of the element type of the first result of a node whose shape follows from its inputs."""
    if node.op_type in _FLAGS:
        return int(onnx.TensorProto.BOOL)
    if node.op_type == "Cast":
        return int(attributes(node)["to"])
    return element_type(node.input[1 if node.op_type == "Where" else 0])


def _reduced(node: onnx.NodeProto, shape: Shape, constants: Mapping[str, np.ndarray]) -> Shape | None:
    """Return the shape of what a reduction leaves of a value; None if its axes are not known."""
    given = attributes(node)
    named = constants.get(node.input[1]) if len(node.input) > 1 else given.get("axes")
    if named is None:
        return None
    axes = [int(axis) % len(shape) for axis in np.reshape(named, -1)]
    if given.get("keepdims", 1):
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return _with_axes(shape, axes, added=False)


def _with_axes(shape: Shape, axes: list[int], added: bool) -> Shape:
    """Return a shape with axes of one element more, or less."""
    rank = len(shape) + (len(axes) if added else 0)
    places = {axis % rank for axis in axes}
    if not added:
        return tuple(size for axis, size in enumerate(shape) if axis not in places)
    sizes = iter(shape)
    return tuple(1 if axis in places else next(sizes) for axis in range(rank))
