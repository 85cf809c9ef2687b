"""Convert the creation of tensors: constants of a segment, or expansions of one number to sizes that change."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import Builder, Dim, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts, overloads

aten = torch.ops.aten

CONSTANTS = overloads("arange.start_step full scalar_tensor")
"""Overloads that read no values of tensors: each segment that needs their result makes it anew."""


@converts(aten.full.default, aten.full_like.default)
def _full(b: Builder, out: Value, like: Any, value: Any, *rest: Any) -> Value:
    return b.expand(b.number(value, out.dtype), out.shape) if out.rank else b.number(value, out.dtype)


@converts(aten.scalar_tensor.default)
def _scalar(b: Builder, out: Value, value: Any, *rest: Any) -> Value:
    return b.number(value, out.dtype)


@converts(aten.arange.start_step)
def _arange(b: Builder, out: Value, start: Any, end: Any, step: Any, *rest: Any) -> Value:
    if out.dtype not in (torch.int64, torch.int32, torch.float32) or not isinstance(step, (int, float)):
        raise NotConvertibleError("a range with a step that changes, or of another dtype")
    if out.dtype is torch.float32 and not all(isinstance(value, int) for value in (start, step)):
        raise NotConvertibleError("a range of fractions, which PyTorch computes in float64")
    if isinstance(out.shape[0], Dim) or isinstance(start, Dim) or isinstance(end, Dim):
        return b.op("Range", *(b.number(value, out.dtype) for value in (start, end, step)))
    return b.constant([start + step * index for index in range(out.shape[0])], out.dtype)
