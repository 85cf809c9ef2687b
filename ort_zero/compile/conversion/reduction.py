"""Convert reductions over dimensions."""

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


@converts(aten.var.correction)
def _variance(b: Builder, out: Value, x: Value, dims: Any, correction: Any, keepdim: bool) -> Value:
    """Add up in float64, as PyTorch does. (Its ``var_mean`` has NaN for infinity in some orders of the elements.)"""
    wanted = dimensions(x, dims)
    sizes = [x.shape[dim] for dim in wanted]
    if any(not isinstance(size, int) for size in sizes) or not x.rank:
        raise NotConvertibleError("a variance over a size that changes")
    count = math.prod(size for size in sizes if isinstance(size, int))
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise NotConvertibleError("a variance without degrees of freedom")
    wide = b.cast(x, torch.float64)
    away = b.op("Sub", wide, b.reduce("ReduceMean", wide, wanted, True))
    total = b.reduce("ReduceSum", b.op("Mul", away, away), wanted, keepdim)
    return b.op("Div", total, b.constant(divisor, torch.float64))


@converts(aten.std.correction)
def _deviation(b: Builder, out: Value, x: Value, *arguments: Any) -> Value:
    return b.op("Sqrt", _variance(b, out, x, *arguments))
