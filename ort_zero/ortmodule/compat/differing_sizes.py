"""Keeps sizes apart that may differ, as those of two slices or of what two masks select; imports onnxruntime.

ORT (1.19.2) takes the sizes of an elementwise operator's operands for one where it does not know them
(``orttraining/core/graph/gradient_builder_base.cc``, ``ComputeBroadcastBackwardAxes``; its symbolic shape inference
does too). Where one of them is 1 in some batch and the other is not, the operand is broadcast, and the gradient is
wrong, or has the wrong size and ends the process by an assertion. So operands with such sizes are broadcast before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from onnx import TensorProto, helper
from onnxruntime.tools import symbolic_shape_infer as upstream

from ort_zero.ortmodule.compat.broadcast_operators import ATEN, BROADCAST
from ort_zero.ortmodule.compat.shape_inference_rules import LastingShapeInference

_BROADCASTING = frozenset(
    "Add Div Equal Expand Greater GreaterOrEqual Less LessOrEqual MatMul Max Min Mod Mul PRelu Pow "
    "Sub Sum Where".split()
)
"""Operators of ONNX whose operands are broadcast."""
_OTHER_RESULTS = frozenset(
    "ATen Bernoulli Dropout Multinomial PythonOp RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators whose results may differ though their inputs and attributes are the same."""
_MOST_SAMPLES = 4096
"""Number of sizes, or of pairs of them, with which two formulas are compared."""


class DifferingSizes(LastingShapeInference):
    """Infers shapes without taking sizes for equal of which one may be 1 where the other is not.

    Sizes of the graph's inputs are taken for equal all the same: that is guarded.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._is_broadcasting = False
        """Whether the operator that is inferred broadcasts; others need sizes that are equal."""
        self._new_sizes: dict[tuple, str] = {}
        self._results: dict[tuple, list[str]] = {}
        self._first: dict[str, str] = {}
        """Value that was computed first, by one that is computed in the same way."""
        self._compared: dict[tuple, bool] = {}
        self.assumed_equal: list[tuple[str, ...]] = []
        """Symbols of the inputs' sizes without whose equality sizes that meet would differ."""

    def may_differ(self, a: Any, b: Any) -> bool:
        """Return whether one of two sizes can be 1 where the other is not, unless they are guarded.

        Args:
            a: a number, a symbol, a formula, or None for one that is unknown.
            b: the same.
        """
        if a == b or 1 in (a, b) or (self._is_certain(a) and self._is_certain(b)):
            return a is None and b is None
        if (a, b) not in self._compared:
            together = self._are_one_together(a, b) or self._are_equal_for_arguments_of_equal_sizes(a, b)
            self._compared[a, b] = self._compared[b, a] = not together
        return self._compared[a, b]

    def _is_certain(self, size: Any) -> bool:
        return isinstance(size, int) or size in self.input_symbols

    def _formulas(self, *sizes: Any) -> tuple[list[Any], list[Any]]:
        """Return sizes as formulas, and their symbols in order; nothing if one of them is unknown."""
        found = [size if isinstance(size, int) else self.symbolic_dims_.get(size) for size in sizes]
        if None in found:
            return [], []
        formulas = list(map(upstream.sympy.sympify, found))
        return formulas, sorted(set().union(*(formula.free_symbols for formula in formulas)), key=str)

    def _are_one_together(self, a: Any, b: Any) -> bool:
        """Return whether two formulas of the inputs' sizes are 1 for the same sizes, as far as samples show."""
        formulas, symbols = self._formulas(a, b)
        if not 1 <= len(symbols) <= 2 or not {str(one) for one in symbols} <= self.input_symbols:
            return False
        both = upstream.sympy.lambdify(symbols, formulas, modules=[{"Min": min, "Max": max}, "math"])
        most = round(_MOST_SAMPLES ** (1 / len(symbols)))
        samples = itertools.product(range(1, most + 1), repeat=len(symbols))
        try:
            return all(1 not in values or max(values) == 1 for values in itertools.starmap(both, samples))
        except (ArithmeticError, TypeError, NameError):  # a division by zero, or a function that Python lacks
            return False

    def _are_equal_for_arguments_of_equal_sizes(self, a: Any, b: Any) -> bool:
        """Return whether two formulas are the same if arguments go on having the same sizes as each other.

        A mask that is reshaped to ``(batch size of the ids, -1)`` has the length of the ids only if its own batch size
        is theirs. Where formulas are the same, what they need is noted in ``assumed_equal``.
        """
        formulas, symbols = self._formulas(a, b)
        if not formulas:
            return False
        alike: dict[tuple, list[Any]] = {}
        for symbol in symbols:
            axis, size = self.input_axes.get(str(symbol)), self.traced_sizes.get(str(symbol))
            if axis is None or size is None:
                return False
            alike.setdefault((axis, size), []).append(symbol)
        first = {symbol: group[0] for group in alike.values() for symbol in group}
        one, other = (formula.subs(first) for formula in formulas)
        if one != other:
            return False
        self.assumed_equal += [tuple(map(str, group)) for group in alike.values() if len(group) > 1]
        return True

    def _new_symbolic_dim_from_output(self, node, out_idx=0, dim=0):
        if node.op_type in _OTHER_RESULTS:
            return super()._new_symbolic_dim_from_output(node, out_idx, dim)
        key = (*self._computation(node), out_idx, dim)
        if key not in self._new_sizes:
            self._new_sizes[key] = str(super()._new_symbolic_dim_from_output(node, out_idx, dim))
        return self.symbolic_dims_[self._new_sizes[key]]

    def _computation(self, node):
        """Return what says how a node computes its results: nodes for which it is equal have equal results."""
        inputs = tuple(self._first.get(name, name) for name in node.input)
        attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
        return node.domain, node.op_type, inputs, tuple(attributes)

    def _add_suggested_merge(self, symbols, apply=False):
        pairs = itertools.combinations(symbols, 2)
        if not self._is_broadcasting or not any(itertools.starmap(self.may_differ, pairs)):
            super()._add_suggested_merge(symbols, apply)

    def _onnx_infer_single_node(self, node):
        self._is_broadcasting = node.op_type in _BROADCASTING
        super()._onnx_infer_single_node(node)
        if node.op_type not in _OTHER_RESULTS:
            first = self._results.setdefault(self._computation(node), list(node.output))
            self._first.update(zip(node.output, first, strict=False))  # some results of an operator may be left out
        if node.op_type not in _BROADCASTING - {"MatMul", "Expand"}:
            return  # these have rules of upstream's
        shapes = [self._get_shape(node, i) for i in range(len(node.input))]
        if all(shape is not None for shape in shapes) and any(self._differ(shapes)):
            shape = shapes[0]
            for other in shapes[1:]:
                shape = self._broadcast_shapes(shape, other)
            info = self.known_vi_[node.output[0]]
            kind = info.type.tensor_type.elem_type
            info.CopyFrom(helper.make_tensor_value_info(info.name, kind, shape))

    def _differ(self, shapes: Sequence[Sequence[Any]]) -> Iterator[bool]:
        for one, other in itertools.combinations(shapes, 2):
            yield any(itertools.starmap(self.may_differ, zip(reversed(one), reversed(other), strict=False)))

    def _broadcast_shapes(self, shape1, shape2):
        rank = max(len(shape1), len(shape2))
        padded = ([1] * (rank - len(shape)) + list(shape) for shape in (shape1, shape2))
        return [self._broadcast_sizes(a, b) for a, b in zip(*padded, strict=True)]

    def _broadcast_sizes(self, a, b):
        if not self.may_differ(a, b):
            return super()._broadcast_shapes([a], [b])[0]
        size = self.known_size(a, b)
        if size is None:
            size = self._new_sizes.setdefault(tuple(sorted((str(a), str(b)))), f"broadcast_{len(self._new_sizes)}")
            self.symbolic_dims_[size] = upstream.sympy.Symbol(size, integer=True, nonnegative=True)
        elif isinstance(size, str):
            self.least[size] = max(2, self.least.get(size, 0))
        return size

    def let_differ(self, model: Any) -> bool:
        """Broadcast operands before the operators that may have to, by nodes whose gradient looks at the sizes.

        Args:
            model: ONNX ModelProto that was inferred, which is changed.

        Returns:
            Whether there are such nodes now: :data:`~ort_zero.ortmodule.compat.broadcast_operators.BROADCAST`.
        """
        editor = _Editor(model)
        for node in list(model.graph.node):
            for i, others in _unlike_operands(self, node):
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


def _unlike_operands(inference: DifferingSizes, node: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield the operands of `node` that may have to be broadcast with others of unknown sizes, each with these others.

    An operand of bools is left out: it has no gradient.
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
        others = [j for j, other in enumerate(shapes) if _is_broadcast(inference, shape, other)]
        if others and inference.known_vi_[node.input[i]].type.tensor_type.elem_type != TensorProto.BOOL:
            yield i, others


def _is_broadcast(inference: DifferingSizes, shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether an operand of sizes `shape` may be broadcast with one of sizes `other`."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return any(inference.may_differ(a, b) and inference.known_size(a, b) != a for a, b in pairs)
