"""Convert look-ups by index."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts

aten = torch.ops.aten


@converts(aten.embedding.default)
def _embedding(b: Builder, out: Value, weight: Value, indices: Value, *rest: Any) -> Value:
    return b.op("Gather", weight, indices, axis=0)


@converts(aten.index_select.default)
def _index_select(b: Builder, out: Value, x: Value, dim: int, indices: Value) -> Value:
    if not x.rank or indices.rank != 1:
        raise NotConvertibleError("a look-up without dimensions")
    return b.op("Gather", x, indices, axis=dim % x.rank)


@converts(aten.gather.default)
def _gather(b: Builder, out: Value, x: Value, dim: int, indices: Value, sparse: bool) -> Value:
    if not x.rank or not indices.rank:
        raise NotConvertibleError("a look-up without dimensions")
    return b.op("GatherElements", x, indices, axis=dim % x.rank)


@converts(aten.index.Tensor)
def _index(b: Builder, out: Value, x: Value, indices: list[Value | None]) -> Value:
    lookups = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(lookups) != 1 or lookups[0][1].dtype not in (torch.int64, torch.int32):
        raise NotConvertibleError("a look-up by several tensors or by a mask")
    dim, index = lookups[0]
    return b.op("Gather", x, index, axis=dim)
