"""Computes sizes again that a trace has computed, for arguments of other sizes.

A :class:`SizeProgram` is the part of a traced graph that sizes depend on. Numbers are computed as the trace computes
them; of tensors only the shapes are, by PyTorch's own operators on the meta device. It is plain data, which a file can
hold; :mod:`ort_zero.ortmodule.compat.trace_slices` makes it from a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Argument = tuple
"""An argument of a step: ``("step", INDEX)``, ``("value", CONSTANT)`` or ``("items", ARGUMENTS)``."""
ARGUMENT, ARGUMENT_SIZE, WEIGHT, TENSOR = "argument", "argument size", "weight", "tensor"
"""Steps that are no operators: an argument of the module, one of its sizes, a tensor of fixed sizes, a constant."""
LIST, ITEM, ZEROS, SHAPE_OF = "list", "item", "zeros", "shape"
"""More of them: a list, an item of one, zeros as many as a tensor has elements, the shape of a computed tensor."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the trace."""

    operator: str
    """``"aten::mul"`` with the name of the overload behind a dot if it has one, or a name of this module."""
    arguments: tuple[tuple[str | None, Argument], ...]
    """Pairs (name, argument); the name is None for an argument that is given by position."""
    in_place: bool = False
    """Whether the operator may change the shape of its first argument."""
    of_numbers: bool = False
    """Whether the result is a number of Python's, so that it is computed in Python's precision."""


class SizeProgram:
    """The steps that compute sizes from the shapes of a module's arguments, each after those that it needs.

    Args:
        steps: the steps.
    """

    def __init__(self, steps: Sequence[Step] = ()):
        self.steps = list(steps)
        self._index = {repr(step): i for i, step in enumerate(self.steps)}

    def add(self, step: Step) -> int:
        """Add a step if there is no equal one; return its index."""
        index = self._index.setdefault(repr(step), len(self.steps))
        if index == len(self.steps):
            self.steps.append(step)
        return index


class Evaluation:
    """The results of a program for the shapes of one call.

    The layers of a model are alike: an operator that was run on the same shapes before is not run again.

    Args:
        program: the program, which may grow meanwhile.
        shapes: shape of each tensor among the arguments.
    """

    def __init__(self, program: SizeProgram, shapes: Sequence[Sequence[int]]):
        self._program = program
        self._shapes = shapes
        self._values: list[Any] = []
        self._results: dict[tuple, Any] = {}
        """Result of each operator by its arguments."""
        self._shared: dict[tuple, Any] = {}
        """The one tensor that stands for all of a shape, or of a number."""

    def result(self, index: int) -> Any:
        """Return the result of a step; runs it, and all before it, if that was not done yet.

        Raises:
            Exception: whatever an operator says to these shapes.
        """
        with torch.no_grad():
            while len(self._values) <= index:
                self._values.append(self._result(self._program.steps[len(self._values)]))
        return self._values[index]

    def _result(self, step: Step) -> Any:
        given = [(name, self._built(argument)) for name, argument in step.arguments]
        key = (step.operator, step.of_numbers, *(_key(value) for _, value in given))
        found = self._results.get(key, self)
        if found is self:
            found = self._results[key] = self._share(self._run(step, given))
        return found

    def _run(self, step: Step, given: list[tuple[str | None, Any]]) -> Any:
        positional = [value for name, value in given if name is None]
        if step.in_place:
            positional[0] = positional[0].clone()
        if step.of_numbers:
            positional = _in_double(step.operator, positional)
        own = _OWN.get(step.operator)
        if own is not None:
            return own(self._shapes, *positional)
        return _operator(step.operator)(*positional, **{name: value for name, value in given if name is not None})

    def _built(self, argument: Argument) -> Any:
        kind, content = argument
        if kind == "step":
            return self._values[content]
        return [self._built(item) for item in content] if kind == "items" else content

    def _share(self, value: Any) -> Any:
        """Return the tensor that stands for all that are like `value`."""
        if isinstance(value, torch.Tensor):
            if value.device.type == "meta":
                return self._shared.setdefault((value.shape, value.stride(), value.dtype), value)
            return self._shared.setdefault((value.dtype, value.item()), value) if value.dim() == 0 else value
        return [self._share(item) for item in value] if isinstance(value, (list, tuple)) else value


def _key(value: Any) -> Any:
    """Return what tells a value from others; all tensors of an evaluation live as long as it."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


@functools.cache
def _operator(name: str) -> Any:
    space, _, operator = name.partition("::")
    operator, _, overload = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload or "default")


def _in_double(operator: str, given: list[Any]) -> list[Any]:
    """Return the operands of an operator with doubles in the place of integers where Python computes a float.

    torch computes the quotient of two integers, and the product of an integer and a float, in its default precision.
    """
    floats = any(
        isinstance(value, float) or isinstance(value, torch.Tensor) and value.is_floating_point() for value in given
    )
    if not floats and not (operator.startswith("aten::div.") and not any(isinstance(value, str) for value in given)):
        return given
    return [
        value.double() if isinstance(value, torch.Tensor) and not value.dim() and value.dtype != torch.bool else value
        for value in given
    ]


def _number(_: Any, tensor: Any) -> Any:
    return tensor.item() if isinstance(tensor, torch.Tensor) else tensor


def _grouped_mm(_: Any, one: torch.Tensor, other: torch.Tensor, *more: Any) -> torch.Tensor:
    """Return the shape of rows times a matrix for each group; the meta device takes them in bfloat16 only."""
    if (one.dim(), other.dim()) != (2, 3):
        raise NotImplementedError("groups of another form")
    return torch.empty(one.shape[0], other.shape[2], dtype=one.dtype, device="meta")


_OWN: dict[str, Any] = {
    ARGUMENT: lambda shapes, i, dtype: torch.empty(shapes[i], dtype=dtype, device="meta"),
    ARGUMENT_SIZE: lambda shapes, i, axis: shapes[i][axis],
    WEIGHT: lambda _, sizes, dtype: torch.empty(sizes, dtype=dtype, device="meta"),
    TENSOR: lambda _, values, dtype: torch.tensor(values, dtype=dtype),
    LIST: lambda _, items: items,
    ITEM: lambda _, items, i: items[i],
    ZEROS: lambda _, tensor: torch.zeros(tensor.shape, dtype=tensor.dtype),
    SHAPE_OF: lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
    "aten::size": lambda _, tensor, *axis: tensor.size(*axis) if axis else list(tensor.shape),
    "aten::numel": lambda _, tensor: tensor.numel(),
    "aten::dim": lambda _, tensor: tensor.dim(),
    "aten::len": lambda _, items: len(items),
    "aten::_grouped_mm": _grouped_mm,
    "prim::NumToTensor": lambda _, number: torch.tensor(number),
    "aten::Int": lambda _, tensor: int(tensor),
    "aten::Float": lambda _, tensor: float(tensor),
    "aten::Bool": lambda _, tensor: bool(tensor),
    "aten::IntImplicit": _number,
    "aten::FloatImplicit": _number,
    "aten::ScalarImplicit": _number,
}
"""What steps do that are no operators of PyTorch with an overload of their own."""


def is_own(operator: str) -> bool:
    """Return whether a step of this name needs no overload."""
    return operator in _OWN


def is_known(operator: str) -> bool:
    """Return whether PyTorch has this operator, ``"aten::mul.Tensor"``."""
    try:
        _operator(operator)
    except (AttributeError, RuntimeError):
        return False
    return True
