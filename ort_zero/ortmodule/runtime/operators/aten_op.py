"""Makes any ATen operator a node that runs it in PyTorch, with the gradient that PyTorch knows.

This is for operators that have no symbolic, or whose ONNX form ONNX Runtime cannot run or differentiate. The inputs of
the node are the operator's tensors, and those of its numbers that depend on the graph's inputs; everything else is part
of an :class:`Operator`, which is plain data.

Complex tensors cannot be values of ORT: between two such nodes they are pairs of real numbers in a last axis of size 2.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ort_zero.ortmodule.compat.torch_onnx import TracedNode, TracedValue
from ort_zero.ortmodule.runtime.export import pytorch_calls
from ort_zero.ortmodule.runtime.operators import shape_inference, torch_fallback


@dataclass(frozen=True, slots=True)
class Tensor:
    """The i-th input of the node."""

    index: int
    kind: str = "real"
    """Kind of the elements: ``"real"``; ``"complex"`` for pairs of numbers; ``"bool"``, which ORT hands over as
    bytes."""


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that the i-th input of the node holds."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is part of the operator: number, text, dtype, None."""

    value: Any


@dataclass(frozen=True, slots=True)
class List:
    """A list of arguments of any of these kinds."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Operator:
    """One ATen operator (or one that a package registered) with all that does not come from the graph."""

    name: str
    """Name of the operator with its namespace, such as ``"aten::cumprod"``."""
    overload: str
    """Name of the overload, empty for the default one."""
    arguments: tuple
    """Pairs (name, argument); the name is None for an argument that is given by position."""

    @property
    def function_name(self) -> str:
        """The name under which ORT finds it: the same for equal operators."""
        return f"ort_zero.{self.name.replace('::', '.')}.{zlib.crc32(repr(self).encode()):08x}"

    @property
    def without_hooks(self) -> bool:
        """Whether saved-tensor hooks stop it from running."""
        if self.name != pytorch_calls.OPERATOR:
            return False
        return pytorch_calls.CALLS.numbered(self.arguments[1][1].value).without_hooks

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the results of the operator for the inputs of its node, as values that ORT can hold."""
        positional = [_build(argument, tensors) for name, argument in self.arguments if name is None]
        by_name = {name: _build(argument, tensors) for name, argument in self.arguments if name is not None}
        if self.name.endswith("_"):  # it would change an input, which belongs to the graph
            positional[0] = positional[0].clone()
        result = _callable(self.name, self.overload)(*positional, **by_name)
        return [_as_value(part) for part in _flat_results(result)]


def _build(argument: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of an argument. No inner function: one that calls itself would keep `tensors` alive."""
    if isinstance(argument, Tensor):
        return _from_value(tensors[argument.index], argument.kind)
    if isinstance(argument, Number):
        return tensors[argument.index].item()
    if isinstance(argument, List):
        return [_build(item, tensors) for item in argument.items]
    return argument.value


def _flat_results(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in _flat_results(part)]
    return [result]


def _from_value(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "complex":
        return torch.view_as_complex(tensor)
    return tensor.view(torch.bool) if kind == "bool" and tensor.dtype == torch.uint8 else tensor


def _as_value(result: Any) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        return torch.tensor(result)
    return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result


@functools.cache
def _callable(name: str, overload: str) -> Any:
    space, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, space), operator)
    return getattr(packet, overload or "default")


def operator_of(node: TracedNode) -> tuple[Operator, list[TracedValue]]:
    """Return the operator of a traced node, and those of its inputs that the graph has to give.

    Raises:
        TypeError: an argument is neither known at export nor a tensor.
    """
    inputs: list[TracedValue] = []

    def read(value: TracedValue, number: bool) -> Any:
        if value.is_constant:
            return Constant(value.constant)
        if value.items is not None:
            return List(tuple(read(item, item.is_number) for item in value.items))
        if number and value.constant_number is not None:
            return Constant(value.constant_number)
        inputs.append(value)
        if number or value.is_number:
            return Number(len(inputs) - 1)
        if value.is_tensor:
            return Tensor(len(inputs) - 1, value.value_kind)
        raise TypeError(f"{node.name}: an argument of type {value.kind} depends on the inputs")

    schema = node.schema
    arguments = tuple(
        (name, read(value, schema.wants_number(i)))
        for i, (name, value) in enumerate(zip(schema.names, node.inputs, strict=True))
    )
    return Operator(node.name, schema.overload, arguments), inputs


_classes: dict[Operator, type] = {}


def function_for(operator: Operator) -> tuple[str, type]:
    """Return name and autograd Function of the nodes that run `operator`."""
    name = operator.function_name
    cls = _classes.get(operator)
    if cls is None:
        cls = _classes[operator] = torch_fallback.node_class(name, operator)
    return name, cls


def operator_named(function_name: str) -> Operator | None:
    """Return the operator that nodes of this name run; None if the name is not one of ours."""
    return next((operator for operator in _classes if operator.function_name == function_name), None)


def result_shapes(
    operator: Operator, inputs: Sequence[TracedValue], outputs: Sequence[TracedValue], *, trusts_ones: bool = True
) -> list[list]:
    """Return the sizes that the results have for every size of the graph's inputs; None where they may vary.

    Args:
        operator: what is run.
        inputs: its tensors and numbers.
        outputs: its results.
        trusts_ones: take sizes of 1 that the exporter knows for what they always are. Where it cannot infer a shape, as
            that of the pieces of ``chunk``, it leaves the traced one.
    """
    traced = [v.traced_sizes for v in inputs]
    all_traced = all(size is not None for sizes in traced for size in sizes)
    dtypes = [v.dtype for v in inputs]
    known = [[None if size == 1 and not trusts_ones else size for size in v.known_sizes] for v in inputs]
    found = shape_inference.output_shapes(operator, known, dtypes)
    if found is None or len(found) != len(outputs):
        if all_traced:
            ones = shape_inference.ones_that_stay(operator, known, traced, dtypes)
            if [len(shape) for shape in ones] == [out.rank for out in outputs]:
                return ones
        return [[None] * len(out.traced_sizes) for out in outputs]
    numbers = [[dim if isinstance(dim, int) else None for dim in shape] for shape in found]
    for shape, out in zip(numbers, outputs, strict=True):
        leave_out_others(shape, out.traced_sizes)
    if "pool" in operator.name and all_traced:
        # windows of the size of the whole: images seldom change theirs
        ones = shape_inference.ones_that_stay(operator, known, traced, dtypes, among=(1,))
        if [len(shape) for shape in ones] == [len(shape) for shape in numbers]:
            return [[b or a for a, b in zip(*both, strict=True)] for both in zip(numbers, ones, strict=True)]
    return numbers


def leave_out_others(shape: list, traced: Sequence[int | None]) -> None:
    """Replace the numbers in `shape` that are not the traced sizes by None: they came from the sizes of a trial."""
    for axis, (dim, size) in enumerate(zip(shape, traced, strict=False)):
        if isinstance(dim, int) and size is not None and dim != size:
            shape[axis] = None


def uses_complex(node: TracedNode) -> bool:
    """Return True if a tensor that the operator takes or returns is complex."""
    return any(value.is_complex for value in _flat([*node.inputs, *node.outputs]))


def _flat(values: Sequence[TracedValue]) -> list[TracedValue]:
    return [leaf for value in values for leaf in (_flat(value.items) if value.items is not None else [value])]
