"""A training graph as numbers: which node makes and reads which value, and how many bytes a value takes.

All of the planning works on this form, which is a hundred times faster to edit and to walk than the ONNX model.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import onnx

from ort_zero.ortmodule.compat.ort_kernels import (
    ALIASES,
    ATEN_IN_PLACE,
    BARRIER,
    FROM_TORCH,
    FUSED_LOSS,
    HEAP,
    LOGITS_AT_ONCE,
    LOSS_BUFFERS,
    RECOMPUTED,
    SCRATCH,
    SCRATCH_FROM,
    loss_copies,
    loss_slice,
)
from ort_zero.ortmodule.onnx_edit.topology import input_names
from ort_zero.ortmodule.recompute.missing_shapes import constants_of, shape_of_result, type_of_result

_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2}
"""Bytes of one element, by ONNX's number of the data type."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph; a value is given by its number, the index into :attr:`GraphModel.sizes`."""

    name: str
    operator: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    copy: bool = False
    """Whether it computes again what another node has computed."""
    scratch: tuple[int, ...] = ()
    """Sizes in bytes of the blocks that the kernel takes from the arena while it runs."""
    heap: int = 0
    """Bytes that the kernel takes outside of the arena while it runs."""


@dataclass(slots=True)
class GraphModel:
    """A training graph in numbers: its nodes in the order of execution, and the bytes of each value.

    A value's number is the index of its name in :attr:`values` and of its bytes in :attr:`sizes`.
    """

    nodes: list[Node]
    values: list[str]
    """Name of each value."""
    sizes: list[int]
    """Bytes of each value; 0 for what exists before the run (graph inputs, initializers) and for what is not known."""
    given: frozenset[int]
    """Values that exist before the run."""
    results: frozenset[int]
    """Values that stay after it."""
    barrier: int
    """Index of the barrier among the nodes, -1 without one."""
    outside: frozenset[int] = frozenset()
    """Values that are not in ORT's arena."""
    alias: dict[int, int] = field(default_factory=dict)
    """Whose memory a value is, where it has none of its own."""
    unknown: tuple[str, ...] = ()
    """Names of the values whose size is not known."""
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each value whose shape is known, graph inputs and aliases included."""
    constants: tuple[int, ...] = ()
    """Bytes of each initializer: a session takes them from the arena when it is made, before the first run."""

    @classmethod
    def from_onnx(cls, model: onnx.ModelProto, sizes: Mapping[str, int]) -> GraphModel:
        """Return the numbers of an ONNX model.

        Args:
            model: gradient graph of ORT's, with shapes.
            sizes: size of each named dimension.
        """
        graph = model.graph
        known = _Sizes(graph, sizes)
        number: dict[str, int] = {}
        names: list[str] = []

        def at(name: str) -> int:
            if name not in number:
                number[name] = len(names)
                names.append(name)
            return number[name]

        given = frozenset(at(v.name) for v in chain(graph.input, graph.initializer))
        nodes: list[Node] = []
        alias: dict[int, int] = {}
        outside: set[int] = set()
        barrier = -1
        for i, node in enumerate(graph.node):
            reads = tuple(dict.fromkeys(at(name) for name in input_names(node)))
            makes = tuple(at(name) for name in node.output if name)
            if node.op_type == BARRIER:
                barrier = i
            if node.op_type in ALIASES and at(node.input[0]) not in given:
                alias[makes[0]] = alias.get(at(node.input[0]), at(node.input[0]))
            of_torch = _aten_operator(node)
            if of_torch in ATEN_IN_PLACE:
                changed = at(node.input[ATEN_IN_PLACE[of_torch]])
                alias[makes[0]] = alias.get(changed, changed)
            blocks = SCRATCH.get(node.op_type, 0) if len(node.input) >= SCRATCH_FROM.get(node.op_type, 0) else 0
            scratch = (known.of(node.output[0]),) * blocks
            heap = HEAP[node.op_type] * known.of(node.input[0]) if node.op_type in HEAP else 0
            if of_torch.startswith(FUSED_LOSS):
                # the copies are made when the rest of what the operator takes is free again
                copies = sum(known.of(name) for name in node.output[len(node.output) - loss_copies(of_torch) :])
                heap = max(0, known.while_a_loss_runs(node) - copies)
            if node.op_type in FROM_TORCH:
                outside.update(makes)
            nodes.append(Node(node.name, node.op_type, reads, makes, node.name.endswith(RECOMPUTED), scratch, heap))
        sizes_of = [0 if i in given or i in alias else known.of(name) for i, name in enumerate(names)]
        if barrier >= 0 and any(known.shape(name) == () for name in graph.node[barrier].input):
            # with a loss among the results nothing flows into the others: their gradients are zeros that take no pages
            for name in graph.node[barrier].output:
                sizes_of[at(name)] = 0
        results = frozenset(at(v.name) for v in graph.output)
        shapes = {i: shape for i, name in enumerate(names) if (shape := known.shape(name)) is not None}
        constants = tuple(known.of(tensor.name) for tensor in graph.initializer)
        return cls(
            nodes,
            names,
            sizes_of,
            given,
            results,
            barrier,
            frozenset(outside),
            alias,
            tuple(known.unknown),
            shapes,
            constants,
        )

    def owner(self, value: int) -> int:
        """Return the number of the value in whose memory `value` lies: itself unless it is an alias."""
        return self.alias.get(value, value)

    def makers(self) -> dict[int, int]:
        """Return for each value the place of the node that makes it."""
        return {value: i for i, node in enumerate(self.nodes) for value in node.makes}

    def with_copies(self, kept: Collection[str]) -> GraphModel:
        """Return the graph in which only the copies named in `kept` are left; what read others reads the originals."""
        number = {name: i for i, name in enumerate(self.values)}
        back = {
            value: number[self.values[value].removesuffix(RECOMPUTED)]
            for node in self.nodes
            if node.copy and node.name not in kept
            for value in node.makes
        }
        nodes = [
            dataclasses.replace(node, reads=tuple(dict.fromkeys(back.get(value, value) for value in node.reads)))
            if any(value in back for value in node.reads)
            else node
            for node in self.nodes
            if not node.copy or node.name in kept
        ]
        # where an alias of a copy's is left, the original has taken the copy's place
        alias = {value: back.get(owner, owner) for value, owner in self.alias.items() if value not in back}
        alias = {value: alias.get(owner, owner) for value, owner in alias.items()}
        return dataclasses.replace(self, nodes=nodes, barrier=_barrier(nodes), alias=alias)

    def in_order(self, order: Sequence[int]) -> GraphModel:
        """Return the graph with its nodes in another order."""
        nodes = [self.nodes[i] for i in order]
        return dataclasses.replace(self, nodes=nodes, barrier=_barrier(nodes))


def _barrier(nodes: Sequence[Node]) -> int:
    return next((i for i, node in enumerate(nodes) if node.operator == BARRIER), -1)


def _aten_operator(node: onnx.NodeProto) -> str:
    """Return the name of PyTorch's operator that an ATen node runs, "" for any other node."""
    if node.op_type != "ATen":
        return ""
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"), "")


class _Sizes:
    """Bytes of the values of a graph."""

    def __init__(self, graph: onnx.GraphProto, dims: Mapping[str, int]):
        self._types = {v.name: v.type.tensor_type for v in chain(graph.value_info, graph.output, graph.input)}
        self._dims = dict(dims)
        self._expressions: dict[str, int | None] = {}
        self._found: dict[str, tuple[tuple[int, ...], int]] = {}
        """Shape and element type of values that the graph does not declare."""
        self._initializers = {tensor.name: (tuple(tensor.dims), tensor.data_type) for tensor in graph.initializer}
        self.unknown: list[str] = []
        self._constants = constants_of(graph)
        for node in graph.node:
            if not node.output or not node.output[0] or self.shape(node.output[0]) is not None:
                continue
            shape = shape_of_result(node, self.shape, self._constants)
            if shape is not None:
                self._found[node.output[0]] = shape, type_of_result(node, self._element_type)

    def of(self, name: str) -> int:
        shape = self.shape(name)
        if shape is None:
            self.unknown.append(name)
            return 0
        return _BYTES.get(self._element_type(name), 4) * math.prod(shape)

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._initializers:
            return self._initializers[name][0]
        if name in self._found:
            return self._found[name][0]
        kind = self._type(name)
        if kind is None or not kind.HasField("shape"):
            return None
        dims = [self._dim(dim) for dim in kind.shape.dim]
        known = tuple(size for size in dims if size is not None)
        return known if len(known) == len(dims) else None

    def while_a_loss_runs(self, node: onnx.NodeProto) -> int:
        """Return the bytes that a fused loss takes besides its results: logits of some rows, and their gradient."""
        hidden, weight = self.shape(node.input[0]), self.shape(node.input[1])
        if not hidden or not weight:
            return 0
        classes, width = weight
        at_once = self._constants.get(node.input[-1])
        logits = LOGITS_AT_ONCE if at_once is None else int(at_once)
        every = math.prod(hidden[:-1])
        rows = min(every, max(1, logits // classes))
        # of several chunks, a product of a part of the weight's gradient exists twice
        part = 8 * min(classes, loss_slice(logits)) * width if rows < every else 0
        return 4 * rows * (classes + width) + part + LOSS_BUFFERS

    def _element_type(self, name: str) -> int:
        """Return ONNX's number of the element type, 0 if it is not known."""
        if name in self._initializers:
            return int(self._initializers[name][1])
        if name in self._found:
            return self._found[name][1]
        kind = self._type(name)
        return int(kind.elem_type) if kind is not None else 0

    def _type(self, name: str) -> Any:
        # ORT writes no shape for the copies that it makes
        return self._types.get(name) or self._types.get(name.removesuffix(RECOMPUTED))

    def _dim(self, dim: onnx.TensorShapeProto.Dimension) -> int | None:
        if not dim.dim_param:
            return dim.dim_value if dim.HasField("dim_value") else None
        if dim.dim_param not in self._expressions:
            self._expressions[dim.dim_param] = evaluate(dim.dim_param, self._dims)
        return self._expressions[dim.dim_param]


_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "max": max,
    "min": min,
    "Max": max,
    "Min": min,
    "int": int,
}


def evaluate(text: str, values: Mapping[str, float]) -> int | None:
    """Return the value of a symbolic dimension such as ``"floor(input_dim1/2) + 1"``; None if it is not known."""
    if text in values:
        return int(values[text])
    try:
        return int(_value(ast.parse(text, mode="eval").body, values))
    except (ValueError, TypeError, KeyError, SyntaxError, ZeroDivisionError, OverflowError):
        return None


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _FUNCTIONS[node.func.id](*(_value(argument, values) for argument in node.args))
    raise ValueError(f"not an expression of dimensions: {ast.unparse(node)}")
