"""Convert look-ups by index: those whose negative indices count from the end; others raise for one in PyTorch."""

from __future__ import annotations

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts

aten = torch.ops.aten


@converts(aten.index.Tensor)
def _index(b: Builder, out: Value, x: Value, indices: list[Value | None]) -> Value:
    lookups = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(lookups) != 1 or lookups[0][1].dtype not in (torch.int64, torch.int32):
        raise NotConvertibleError("a look-up by several tensors or by a mask")
    dim, index = lookups[0]
    return b.op("Gather", x, index, axis=dim)
