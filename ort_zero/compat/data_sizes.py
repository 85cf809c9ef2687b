"""Keeps apart sizes that depend on values, as the numbers of elements that two masks select; imports onnxruntime.

ORT (1.19.2) takes the sizes of an elementwise operator's operands for one where it knows none of them
(``orttraining/core/graph/gradient_builder_base.cc``, ``ComputeBroadcastBackwardAxes``; its symbolic shape inference
does too). Where one of them is 1 in a later batch and the other is not, the operand is broadcast, and the gradient has
the wrong size: the process ends by an assertion. So operands with such sizes are broadcast before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from onnx import TensorProto, helper
from onnxruntime.tools import symbolic_shape_infer as upstream

from ort_zero.compat.broadcast_operators import ATEN, BROADCAST
from ort_zero.compat.shape_inference_rules import LastingShapeInference

SOURCES = frozenset(("NonZero", "Compress", "Unique"))
"""Operators whose results have as many elements as values decide."""

_BROADCASTING = frozenset(
    "Add Div Equal Expand Greater GreaterOrEqual Less LessOrEqual MatMul Max Min Mod Mul PRelu Pow "
    "Sub Sum Where".split()
)
"""Operators of ONNX whose operands are broadcast."""
_OTHER_RESULTS = frozenset(
    "ATen Bernoulli Dropout Multinomial PythonOp RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators whose results may differ though their inputs and attributes are the same."""
_WORD = re.compile(r"\w+")


class DataSizes(LastingShapeInference):
    """Infers shapes without taking a size that depends on values for equal to another one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.data_sizes: set[str] = set()
        self._of_value: dict[tuple, str] = {}
        self._results: dict[tuple, list[str]] = {}
        self._first: dict[str, str] = {}
        """Value that was computed first, by one that is computed in the same way."""

    def depends_on_values(self, size: Any) -> bool:
        """Return whether a size, a number or a formula, is made of one that depends on values."""
        return isinstance(size, str) and not self.data_sizes.isdisjoint(_WORD.findall(size))

    def _new_symbolic_dim_from_output(self, node, out_idx=0, dim=0):
        if node.op_type not in SOURCES:
            return super()._new_symbolic_dim_from_output(node, out_idx, dim)
        key = (*self._computation(node), out_idx, dim)
        if key not in self._of_value:
            self._of_value[key] = str(super()._new_symbolic_dim_from_output(node, out_idx, dim))
            self.data_sizes.add(self._of_value[key])
        return self.symbolic_dims_[self._of_value[key]]

    def _computation(self, node):
        """Return what says how a node computes its results: nodes for which it is equal have equal results."""
        inputs = tuple(self._first.get(name, name) for name in node.input)
        attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
        return node.domain, node.op_type, inputs, tuple(attributes)

    def _add_suggested_merge(self, symbols, apply=False):
        if not any(self.depends_on_values(s) for s in symbols):
            super()._add_suggested_merge(symbols, apply)

    def _onnx_infer_single_node(self, node):
        super()._onnx_infer_single_node(node)
        if node.op_type not in _OTHER_RESULTS:
            first = self._results.setdefault(self._computation(node), list(node.output))
            self._first.update(zip(node.output, first, strict=True))
        if node.op_type not in _BROADCASTING - {"MatMul", "Expand"}:
            return  # these have rules of upstream's
        shapes = [self._get_shape(node, i) for i in range(len(node.input))]
        if all(shape is not None for shape in shapes) and any(map(self.depends_on_values, sum(shapes, []))):
            shape = shapes[0]
            for other in shapes[1:]:
                shape = self._broadcast_shapes(shape, other)
            info = self.known_vi_[node.output[0]]
            kind = info.type.tensor_type.elem_type
            info.CopyFrom(helper.make_tensor_value_info(info.name, kind, shape))

    def _broadcast_shapes(self, shape1, shape2):
        shape = super()._broadcast_shapes(shape1, shape2)
        for axis, size in enumerate(shape):
            if size is None:
                shape[axis] = f"broadcast_{len(self.data_sizes)}"
                self._new_data_size(shape[axis])
        return shape

    def _new_data_size(self, name: str) -> None:
        self.symbolic_dims_[name] = upstream.sympy.Symbol(name, integer=True, nonnegative=True)
        self.data_sizes.add(name)


def let_sizes_differ(model: Any) -> bool:
    """Broadcast operands before the operators that may have to, by nodes whose gradient looks at the sizes.

    Args:
        model: ONNX ModelProto, which is changed; one in which no size depends on values stays as it is.

    Returns:
        Whether there are such nodes now: :data:`~ort_zero.compat.broadcast_operators.BROADCAST`.
    """
    if not any(node.op_type in SOURCES for node in model.graph.node):
        return False
    inference = DataSizes(2**31 - 1, True, True, 0)
    inference.infer_python_op = lambda *about: None
    inference.infer_all(model)
    editor = _Editor(model)
    for node in list(model.graph.node):
        for i, others in _unlike_operands(inference, node):
            for other in others:
                editor.broadcast(node, i, other)
        editor.nodes.append(node)
    return editor.done()


class _Editor:
    """Puts nodes before others."""

    def __init__(self, model: Any):
        self.model = model
        self.graph = model.graph
        self.nodes: list[Any] = []
        self.given: dict[tuple[str, int], str] = {}
        self.added: set[str] = set()
        self.count = 0

    def broadcast(self, node: Any, i: int, other: int) -> None:
        """Let `node` read its operand `i` broadcast with another one."""
        kept = 2 if node.op_type == "MatMul" else 0
        sizes = node.input[other] if node.op_type == "Expand" else self._sizes(self._original(node, other))
        self.count += 1
        result = f"{node.output[0]}_operand_{i}_{self.count}"
        inputs = [node.input[i], self._sizes(node.input[i]), sizes, self._number(kept)]
        self.nodes.append(helper.make_node("ATen", inputs, [result], result, domain=ATEN, operator=BROADCAST))
        self.given.setdefault((node.output[0], i), node.input[i])
        node.input[i] = result

    def done(self) -> bool:
        """Give the graph its nodes; return whether there are new ones."""
        if self.count:
            if not any(entry.domain == ATEN for entry in self.model.opset_import):
                self.model.opset_import.append(helper.make_opsetid(ATEN, 1))
            nodes = [type(node).FromString(node.SerializeToString()) for node in self.nodes]
            self.graph.ClearField("node")
            self.graph.node.extend(nodes)
        return self.count > 0

    def _original(self, node: Any, i: int) -> str:
        return self.given.get((node.output[0], i), node.input[i])

    def _sizes(self, name: str) -> str:
        sizes = f"{name}_sizes"
        if sizes not in self.added:
            self.added.add(sizes)
            self.nodes.append(helper.make_node("Shape", [name], [sizes], sizes))
        return sizes

    def _number(self, number: int) -> str:
        name = f"ort_zero_sizes_kept_{number}"
        if name not in self.added:
            self.added.add(name)
            self.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [], [number]))
        return name


def _unlike_operands(inference: DataSizes, node: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield the operands of `node` whose sizes may differ from those of others, where one of them depends on values.

    With each come these others. An operand of bools is left out: it has no gradient.
    """
    if node.op_type not in _BROADCASTING:
        return
    names = [node.input[0], node.output[0]] if node.op_type == "Expand" else node.input
    shapes = [shape for shape in map(inference.shape_of, names) if shape is not None]
    if len(shapes) < len(names):
        return
    if node.op_type == "MatMul":
        shapes = [shape[:-2] for shape in shapes]
    for i, shape in enumerate(shapes[:1] if node.op_type == "Expand" else shapes):
        others = [j for j, other in enumerate(shapes) if _differ(inference, shape, other)]
        if others and inference.known_vi_[node.input[i]].type.tensor_type.elem_type != TensorProto.BOOL:
            yield i, others


def _differ(inference: DataSizes, shape: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return any(a != b and 1 not in (a, b) and any(map(inference.depends_on_values, (a, b))) for a, b in pairs)
