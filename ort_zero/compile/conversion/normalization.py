"""Convert normalizations; those without a kernel in ONNX Runtime are decomposed or stay whole in PyTorch."""

from __future__ import annotations

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Size, Value
from ort_zero.compile.conversion.registry import converts

aten = torch.ops.aten


@converts(aten.native_layer_norm.default)
def _layer_norm(
    b: Builder,
    out: tuple[Value, ...],
    x: Value,
    shape: list[Size],
    weight: Value | None,
    bias: Value | None,
    epsilon: float,
) -> tuple[Value, ...]:
    if x.dtype is torch.float64:
        raise NotConvertibleError("a layer norm of float64, whose statistics ONNX Runtime returns as float32")
    if all(size == 1 for size in shape):
        raise NotConvertibleError("a layer norm of single elements, which ONNX Runtime 1.22 refuses")
    if weight is None:
        weight = b.expand(b.constant(1, x.dtype), shape)
    return b.ops(
        "LayerNormalization",
        3,
        x,
        weight,
        *([bias] if bias is not None else []),
        dtypes=[x.dtype, torch.float32, torch.float32],
        axis=-len(shape),
        epsilon=float(epsilon),
    )
