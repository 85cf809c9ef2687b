"""Takes out of a trace what a size depends on, as a :class:`.SizeProgram`."""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Sequence
from typing import Any

import torch

from ort_zero.ortmodule.compat.size_program import (
    ARGUMENT,
    ARGUMENT_SIZE,
    ITEM,
    LIST,
    SHAPE_OF,
    TENSOR,
    WEIGHT,
    ZEROS,
    Argument,
    SizeProgram,
    Step,
    is_known,
    is_own,
)
from ort_zero.ortmodule.compat.torch_onnx.traced import Schema, TracedNode
from ort_zero.ortmodule.compat.trace_origins import (
    bool_index,
    holds_tensors,
    is_data_shaped,
    leaves_values_unread,
    reads_shape,
)

_SAME_SHAPE = frozenset(
    f"aten::{name}"
    for name in "dropout dropout_ relu relu_ gelu tanh sigmoid silu silu_ softmax log_softmax layer_norm detach neg exp"
    " rsqrt abs sqrt".split()
)
"""Operators whose result has the shape of their first argument, whatever the others are."""
_INFIX = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!=", "add": "+", "sub": "-", "mul": "*",
          "div": "/", "floor_divide": "//", "remainder": "%", "__and__": "&", "__or__": "|"}  # fmt: skip
_MOST_ELEMENTS = 4096
"""Maximum number of elements of a constant tensor that a program holds."""
_LONGEST_TEXT = 100


class NotExpressibleError(Exception):
    """A size depends on what only a run of the graph can tell, such as the result of a node that runs in PyTorch."""


class TraceSlices:
    """Takes what sizes depend on out of one trace, while it is made.

    Args:
        arguments: ``torch._C.Value`` of each tensor among the arguments, as they are when the trace begins.
        names: name of each of them, for messages.
        varying: values of other inputs of the graph whose sizes may be others in another call.
    """

    def __init__(self, arguments: Sequence[Any], names: Sequence[str] = (), varying: Sequence[Any] = ()):
        self.program = SizeProgram()
        self._arguments = {value.unique(): i for i, value in enumerate(arguments)}
        self._names = [*names, *(f"argument {i}" for i in range(len(names), len(arguments)))]
        self._varying = {value.unique() for value in varying}
        self._done: dict[tuple[int, bool], Argument] = {}
        """What stands for a value: its elements (True) or its shape (False), by its number."""
        self._failed: dict[tuple[int, bool], str] = {}
        self.numbers: Container[int] = ()
        """Numbers of the values that are numbers of Python's outside of the trace."""
        self._depending: set[int] = set()
        """Indices of the steps that depend on sizes of arguments."""

    def step_of(self, value: Any, *, elements: bool) -> int | None:
        """Return the index of the step that computes a value; None if it depends on no size of an argument.

        Args:
            value: ``torch._C.Value``.
            elements: whether its elements are wanted, not only its shape.

        Raises:
            NotExpressibleError: it depends on more than sizes.
        """
        stack = [(value, elements)]
        while stack:
            value_, mode = stack[-1]
            key = (value_.unique(), mode)
            if key in self._failed:
                for v, m in stack:
                    self._failed[v.unique(), m] = self._failed[key]
                raise NotExpressibleError(self._failed[key])
            if key in self._done:
                stack.pop()
                continue
            try:
                operands = self._operands(value_, mode)
                missing = [(given, m) for given, m in operands if (given.unique(), m) not in self._done]
                if missing:
                    stack += missing
                else:
                    self._done[key] = self._argument(value_, mode)
            except NotExpressibleError as error:
                self._failed[key] = str(error)
        kind, content = found = self._done[value.unique(), elements]
        if not self._depends(found):
            return None
        return content if kind == "step" else self._add(LIST, [(None, found)])

    def text_of(self, value: Any) -> str:
        """Return the Python expression for a value that is computed from sizes of arguments, "" for a longer one."""
        text = self._text(value, 6)
        return text if text is not None and len(text) <= _LONGEST_TEXT else ""

    # -- what a value is computed from -----------------------------------------------------------------------------

    def _operands(self, value: Any, elements: bool) -> list[tuple[Any, bool]]:
        """Return the values that are needed for one, each with whether its elements are."""
        node = value.node()
        kind, inputs = node.kind(), list(node.inputs())
        if kind in ("prim::Param", "prim::Constant"):
            return []
        if not elements:
            if kind == "prim::NumToTensor":
                return []
            if is_data_shaped(kind):
                return [(value, True)]
            if bool_index(node) is not None:
                raise NotExpressibleError("picks elements by a mask")
            if passed := self._passed_on(node):
                return [(passed, False)]
        if reads_shape(kind) and self._argument_size(node) is not None:
            return [(given, True) for given in inputs[1:]]
        if kind in ("prim::PythonOp", "prim::CallFunction", "prim::If", "prim::Loop") or kind.startswith("ort_zero::"):
            raise NotExpressibleError(f"depends on a result of {kind}")
        of_tensors = elements and not reads_shape(kind) and not leaves_values_unread(kind)
        return [(given, of_tensors if holds_tensors(given) else True) for given in inputs]

    def _passed_on(self, node: Any) -> Any | None:
        """Return the value that has the shape of the node's result; None if there may be none."""
        if node.kind() in _SAME_SHAPE or node.kind() == "ort_zero::setitem" or TracedNode(node).passes_on:
            return next(iter(node.inputs()))
        return None

    def _argument(self, value: Any, elements: bool) -> Argument:
        """Return what stands for a value whose operands are there."""
        node = value.node()
        kind = node.kind()
        if kind == "prim::Param":
            return self._input(value, elements)
        if kind == "prim::Constant":
            return self._constant(value.toIValue(), elements)
        if not elements:
            if kind == "prim::NumToTensor":
                return self._step(WEIGHT, (), torch.int64)
            if is_data_shaped(kind):
                return ("step", self._add(SHAPE_OF, [(None, self._done[value.unique(), True])]))
            if passed := self._passed_on(node):
                return self._done[passed.unique(), False]
        operands = [self._done[given.unique(), mode] for given, mode in self._operands(value, elements)]
        if kind in ("prim::ListConstruct", "prim::TupleConstruct"):
            return ("items", tuple(operands))
        if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            return self._item(operands[0], value.offset())
        if reads_shape(kind) and (size := self._argument_size(node)) is not None:
            return self._step(ARGUMENT_SIZE, *size)
        if elements and leaves_values_unread(kind):
            operands[0] = ("step", self._add(ZEROS, [(None, operands[0])]))
        call = self._call(node, operands, elements)
        return self._item(call, value.offset()) if node.outputsSize() > 1 else call

    def _argument_size(self, node: Any) -> tuple[int, int] | None:
        """Return (argument, axis) for a node that reads one size of an argument of the module; else None."""
        inputs = list(node.inputs())
        if node.kind() != "aten::size" or len(inputs) != 2 or inputs[0].unique() not in self._arguments:
            return None
        axis = inputs[1].toIValue() if inputs[1].node().kind() == "prim::Constant" else None
        return (self._arguments[inputs[0].unique()], axis) if axis is not None else None

    def _input(self, value: Any, elements: bool) -> Argument:
        if elements or value.unique() in self._varying:
            raise NotExpressibleError("depends on values, or on the size of an attribute")
        kind = value.type()
        if kind.kind() != "TensorType" or kind.sizes() is None:
            raise NotExpressibleError("depends on an input that is no tensor")
        if value.unique() in self._arguments:
            return self._step(ARGUMENT, self._arguments[value.unique()], kind.dtype())
        return self._step(WEIGHT, tuple(kind.sizes()), kind.dtype())

    def _constant(self, constant: Any, elements: bool) -> Argument:
        if isinstance(constant, torch.Tensor):
            if not elements:
                return self._step(WEIGHT, tuple(constant.shape), constant.dtype)
            if constant.numel() > _MOST_ELEMENTS:
                raise NotExpressibleError("depends on a large constant")
            plain = constant.detach().cpu()
            return self._step(TENSOR, plain.tolist(), plain.dtype)
        return ("value", tuple(constant) if isinstance(constant, list) else constant)

    def _call(self, node: Any, operands: list[Argument], elements: bool) -> Argument:
        """Return the step that runs the operator of a node."""
        kind = node.kind()
        if is_own(kind):
            return ("step", self._add(kind, [(None, operand) for operand in operands]))
        schema = _schema(node)
        operator = f"{kind}.{schema.overload}" if schema.overload else kind
        if not is_known(operator):
            raise NotExpressibleError(f"{operator} cannot be computed outside of the trace")
        device = schema.position("device")
        if device is not None and device < len(operands):
            operands[device] = ("value", torch.device("cpu" if elements else "meta"))
        given = list(zip(schema.names, operands, strict=True))
        in_place = kind.endswith("_") and not kind.endswith("__")
        of_numbers = elements and all(out.unique() in self.numbers for out in node.outputs())
        return ("step", self._add(operator, given, in_place, of_numbers))

    def _item(self, items: Argument, index: int) -> Argument:
        if items[0] == "items":
            return items[1][index]
        return ("step", self._add(ITEM, [(None, items), (None, ("value", index))]))

    def _step(self, operator: str, *constants: Any) -> Argument:
        return ("step", self._add(operator, [(None, ("value", constant)) for constant in constants]))

    def _add(
        self,
        operator: str,
        given: Sequence[tuple[str | None, Argument]],
        in_place: bool = False,
        of_numbers: bool = False,
    ) -> int:
        index = self.program.add(Step(operator, tuple(given), in_place, of_numbers))
        if operator in (ARGUMENT, ARGUMENT_SIZE) or any(self._depends(argument) for _, argument in given):
            self._depending.add(index)
        return index

    def _depends(self, argument: Argument) -> bool:
        kind, content = argument
        if kind == "step":
            return content in self._depending
        return kind == "items" and any(map(self._depends, content))

    # -- for messages ----------------------------------------------------------------------------------------------

    def _text(self, value: Any, depth: int) -> str | None:
        node = value.node()
        kind, inputs = node.kind(), list(node.inputs())
        if depth == 0 or kind == "prim::Param":
            return None
        if kind == "prim::Constant":
            constant = value.toIValue()
            if isinstance(constant, torch.Tensor):
                constant = constant.item() if constant.numel() == 1 else None
            return repr(constant) if isinstance(constant, (int, float)) else None
        if (size := self._argument_size(node)) is not None:
            return f"{self._names[size[0]]}.shape[{size[1]}]"
        if kind in ("prim::NumToTensor", "aten::Int", "aten::Float", "aten::Bool", "aten::detach"):
            return self._text(inputs[0], depth)
        sign = _INFIX.get(kind.removeprefix("aten::"))
        if sign is None or len(inputs) < 2:
            return None
        parts = [self._text(given, depth - 1) for given in inputs[:2]]
        if None in parts:
            return None
        return " ".join([_bracketed(parts[0]), sign, _bracketed(parts[1])])


def _bracketed(text: str | None) -> str:
    return f"({text})" if text and " " in text else str(text)


def _schema(node: Any) -> Schema:
    """Return the overload that a node calls."""
    text = node.schema()
    if text == "(no schema)":
        try:
            return TracedNode(node).schema
        except TypeError as error:
            raise NotExpressibleError(str(error)) from None
    return _parsed(text)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Schema:
    return Schema(torch._C.parse_schema(re.sub(r"\s+", " ", text)))
