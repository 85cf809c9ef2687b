"""Hold the ONNX form of one ATen call, and build the form node by node.

A :class:`Fragment` is plain data: names, operators, constants. Equal fragments of equal layers make equal segments, and
equal segments share one session (:mod:`ort_zero.compile.sessions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""
ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
"""NumPy's type of each dtype that a constant can have."""
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_TO_BOOL = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"}
_TO_INT64 = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size"}


class NotConvertibleError(Exception):
    """An ATen call has no ONNX form here; the message completes "PyTorch runs the operator: "."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A size that changes between calls: a sympy expression over Dynamo's symbols."""

    expression: Any

    def __float__(self) -> float:
        raise NotConvertibleError("an attribute that is a size that changes")

    __int__ = __float__  # type: ignore[assignment]


Size = int | Dim


@dataclass(frozen=True, slots=True)
class Value:
    """A named ONNX tensor of a fragment, with its dtype and sizes in PyTorch."""

    name: str
    dtype: torch.dtype
    """The dtype in PyTorch; a fragment for a provider without 16-bit kernels computes in float32."""
    shape: tuple[Size, ...] = ()
    """The sizes, for arguments and results of the ATen call; values in between have none."""

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One ONNX operator with the names of its inputs and outputs."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant tensor, comparable by value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class Fragment:
    """The ONNX form of one ATen call. Arguments have the names of FX nodes, see :func:`value_name`."""

    nodes: list[OnnxNode] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    """Inputs that hold a size that changes: int64 tensors of one element, by name; the values are expressions."""
    results: tuple[str, ...] = ()
    """The name of each result; the name of an argument where a result is that argument."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype in ONNX of each name."""


def value_name(node: torch.fx.Node, index: int = 0) -> str:
    """Return the name of an FX node's result in all fragments."""
    return f"{node.name}:{index}"


class Builder:
    """Builds the fragment of one ATen call.

    Args:
        name: prefix of the names of new values.
        widen: compute 16-bit floats in float32.
    """

    def __init__(self, name: str, widen: bool):
        self.fragment = Fragment()
        self.widen = widen
        self._name = name

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor has in ONNX."""
        return torch.float32 if self.widen and dtype in SIXTEEN_BIT else dtype

    def _new(self, dtype: torch.dtype) -> str:
        name = f"{self._name}.{len(self.fragment.dtypes)}"
        self.fragment.dtypes[name] = dtype
        return name

    def argument(self, value: Value) -> None:
        """Declare an argument of the ATen call."""
        self.fragment.dtypes[value.name] = self.stored(value.dtype)

    def op(
        self,
        operator: str,
        *inputs: Value | None,
        dtype: torch.dtype | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Value:
        """Add an operator with one result, and return the result."""
        return self.ops(operator, 1, *inputs, dtypes=[dtype], domain=domain, **attributes)[0]

    def ops(
        self,
        operator: str,
        count: int,
        *inputs: Value | None,
        dtypes: Sequence[torch.dtype | None] = (),
        domain: str = "",
        **attributes: Any,
    ) -> tuple[Value, ...]:
        """Add an operator with `count` results, and return the results."""
        wanted = [*dtypes, *[None] * (count - len(dtypes))]
        results = []
        for dtype in wanted:
            dtype = dtype or _default_dtype(operator, inputs)
            results.append(Value(self._new(self.stored(dtype)), dtype))
        self.fragment.nodes.append(
            OnnxNode(
                operator,
                tuple(value.name if value is not None else "" for value in inputs),
                tuple(value.name for value in results),
                tuple(sorted((name, _plain(value)) for name, value in attributes.items() if value is not None)),
                domain,
            )
        )
        return tuple(results)

    def constant(self, values: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Value:
        """Return a constant of one value or of a list of values."""
        stored = self.stored(dtype)
        if stored is torch.bfloat16:
            return self.op("Cast", self.constant(values, torch.float32, shape), dtype=dtype, to=ONNX_TYPES[dtype])
        if stored not in NUMPY_TYPES:
            raise NotConvertibleError(f"a constant of {dtype}")
        if isinstance(values, complex):
            raise NotConvertibleError("a complex number")
        if stored is not torch.bool and not stored.is_floating_point:
            values = np.asarray(values)
            if values.dtype.kind == "f" and not np.array_equal(values, np.trunc(values)):
                raise NotConvertibleError(f"a fraction as {dtype}")
            bounds = np.iinfo(NUMPY_TYPES[stored])  # type: ignore[arg-type]
            if values.size and not (bounds.min <= values.min() and values.max() <= bounds.max):
                raise NotConvertibleError(f"a number beyond the range of {dtype}")
        with np.errstate(over="ignore"):
            array: np.ndarray = np.asarray(values, dtype=NUMPY_TYPES[stored])
        if shape is not None:
            array = np.broadcast_to(array, shape)
        name = self._new(stored)
        self.fragment.constants[name] = Constant(stored, array.shape, array.tobytes())
        return Value(name, dtype, array.shape)

    def size(self, size: Size) -> Value:
        """Return a size as an int64 tensor of one element."""
        if isinstance(size, int):
            return self.constant([size], torch.int64)
        name = f"size:{size.expression}"
        self.fragment.sizes[name] = size.expression
        self.fragment.dtypes[name] = torch.int64
        return Value(name, torch.int64, (1,))

    def vector(self, sizes: Sequence[Size]) -> Value:
        """Return sizes as an int64 tensor of one dimension."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes), torch.int64, (len(sizes),))
        return self.op("Concat", *(self.size(size) for size in sizes), axis=0)

    def number(self, value: Any, dtype: torch.dtype) -> Value:
        """Return a Python number, or a size that changes, as a tensor without dimensions."""
        if isinstance(value, Value):
            return self.cast(value, dtype)
        if isinstance(value, Dim):
            scalar = self.op("Reshape", self.size(value), self.constant([], torch.int64, (0,)))
            return self.cast(scalar, dtype)
        return self.constant(value, dtype)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return `value` in another dtype."""
        if self.stored(value.dtype) == self.stored(dtype):
            return Value(value.name, dtype, value.shape)
        result = self.op("Cast", value, dtype=dtype, to=ONNX_TYPES[self.stored(dtype)])
        return Value(result.name, dtype, value.shape)

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """Return `value` rounded to another float dtype, also where that dtype is computed with in float32."""
        if self.stored(dtype) == dtype or value.dtype == dtype:
            return self.cast(value, dtype)
        narrow = self.op("Cast", value, dtype=dtype, to=ONNX_TYPES[dtype])
        self.fragment.dtypes[narrow.name] = dtype
        return self.op("Cast", narrow, to=ONNX_TYPES[self.stored(dtype)])

    def reshape(self, value: Value, shape: Sequence[Size]) -> Value:
        """Return `value` with other sizes."""
        free = [index for index, size in enumerate(shape) if not isinstance(size, int)]
        if len(free) == 1 and 0 not in shape:
            sizes = self.constant([-1 if index in free else size for index, size in enumerate(shape)], torch.int64)
        else:
            sizes = self.vector(shape)
        result = self.op("Reshape", value, sizes)
        return Value(result.name, value.dtype, tuple(shape))

    def expand(self, value: Value, shape: Sequence[Size]) -> Value:
        """Return `value` repeated along dimensions of size 1."""
        if tuple(shape) == value.shape:
            return value
        result = self.op("Expand", value, self.vector(shape))
        return Value(result.name, value.dtype, tuple(shape))

    def reduce(self, operator: str, value: Value, dims: Sequence[int], keepdim: bool) -> Value:
        """Return the reduction of `value` over dimensions."""
        return self.op(operator, value, self.constant(list(dims), torch.int64), keepdims=int(keepdim))

    def finish(self, results: Sequence[Value]) -> Fragment:
        """Return the fragment with its results."""
        self.fragment.results = tuple(value.name for value in results)
        return self.fragment


def _plain(value: Any) -> Any:
    if isinstance(value, Dim) or (isinstance(value, list) and any(isinstance(item, Dim) for item in value)):
        raise NotConvertibleError("an attribute that is a size that changes")
    return tuple(value) if isinstance(value, list) else value


def _default_dtype(operator: str, inputs: Sequence[Value | None]) -> torch.dtype:
    if operator in _TO_BOOL:
        return torch.bool
    if operator in _TO_INT64:
        return torch.int64
    first = inputs[1] if operator == "Where" else inputs[0]
    if first is None:
        raise AssertionError(f"{operator} without a dtype")
    return first.dtype
