"""Convert reductions over dimensions, sums along a dimension and searches."""

from __future__ import annotations

import math
from typing import Any

import torch

from ort_zero.compile.conversion.arithmetic import truth
from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts

aten = torch.ops.aten


def dimensions(x: Value, dims: Any) -> list[int]:
    """Return dimensions as numbers from 0; None or an empty list stands for all."""
    if dims is None or dims == []:
        return list(range(x.rank))
    return [dim % max(x.rank, 1) for dim in (dims if isinstance(dims, list) else [dims])]


def _reduced(b: Builder, operator: str, x: Value, dims: Any, keepdim: bool) -> Value:
    return b.reduce(operator, x, dimensions(x, dims), keepdim) if x.rank else x


def _reduction(operator: str, *overloads: Any) -> None:
    @converts(*overloads)
    def convert(b: Builder, out: Value, x: Value, *rest: Any) -> Value:
        if operator == "ReduceProd" and not out.dtype.is_floating_point or x.dtype is torch.int64:
            raise NotConvertibleError("a sum or product of integers")  # ONNX Runtime 1.32 computes it in float64
        dims, keepdim = rest[:2] if len(rest) > 1 else (None, False)
        return _reduced(b, operator, b.cast(x, out.dtype), dims, keepdim)


_reduction("ReduceSum", aten.sum.dim_IntList)
_reduction("ReduceMean", aten.mean.default, aten.mean.dim)
_reduction("ReduceProd", aten.prod.default, aten.prod.dim_int)


@converts(aten.any.default, aten.any.dim, aten.any.dims)
def _any(b: Builder, out: Value, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    if out.shape == x.shape:
        return truth(b, x)  # unlike for a sum, no dimensions are not all dimensions
    number = Value(b.cast(truth(b, x), torch.int32).name, torch.int32, x.shape)
    return b.cast(_reduced(b, "ReduceMax", number, dims, keepdim), torch.bool)


@converts(aten.cumsum.default)
def _running_sum(b: Builder, out: Value, x: Value, dim: int, dtype: Any) -> Value:
    if x.rank == 0:
        raise NotConvertibleError("a running sum without dimensions")
    return b.op("CumSum", b.cast(x, out.dtype), b.constant(dim, torch.int64))


@converts(aten.var.correction)
def _variance(b: Builder, out: Value, x: Value, dims: Any, correction: Any, keepdim: bool) -> Value:
    return _moments(b, x, dims, correction, keepdim)[0]


@converts(aten.var_mean.correction)
def _variance_and_mean(
    b: Builder, out: tuple[Value, ...], x: Value, dims: Any, correction: Any, keepdim: bool
) -> tuple[Value, Value]:
    return _moments(b, x, dims, correction, keepdim)


def _moments(b: Builder, x: Value, dims: Any, correction: Any, keepdim: bool) -> tuple[Value, Value]:
    wanted = dimensions(x, dims)
    sizes = [x.shape[dim] for dim in wanted]
    if any(not isinstance(size, int) for size in sizes) or not x.rank:
        raise NotConvertibleError("a variance over a size that changes")
    count = math.prod(size for size in sizes if isinstance(size, int))
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise NotConvertibleError("a variance without degrees of freedom")
    mean = b.reduce("ReduceMean", x, wanted, True)
    away = b.op("Sub", x, mean)
    total = b.reduce("ReduceSum", b.op("Mul", away, away), wanted, keepdim)
    variance = b.op("Div", total, b.constant(divisor, x.dtype))
    return variance, mean if keepdim else b.reduce("ReduceMean", x, wanted, False)
