"""Convert products of matrices, convolutions, pooling and normalizations.

The gradients of convolutions and pooling have no ONNX operator, and PyTorch runs them. Normalizations without a kernel
in ONNX Runtime are decomposed, or stay whole in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Size, Value
from ort_zero.compile.conversion.registry import converts

aten = torch.ops.aten


def _require_float(out: Value) -> None:
    if not out.dtype.is_floating_point:
        raise NotConvertibleError("a product of matrices of integers")


@converts(aten.mm.default, aten.bmm.default)
def _product(b: Builder, out: Value, x: Value, y: Value) -> Value:
    _require_float(out)
    return b.op("MatMul", x, y)


@converts(aten.addmm.default)
def _sum_and_product(b: Builder, out: Value, bias: Value, x: Value, y: Value, beta: Any, alpha: Any) -> Value:
    _require_float(out)
    if beta == 0:
        product = b.op("MatMul", x, y)
        return product if alpha == 1 else b.op("Mul", product, b.number(alpha, out.dtype))
    return b.op("Gemm", x, y, bias, alpha=float(alpha), beta=float(beta))


@converts(aten.convolution.default)
def _convolution(
    b: Builder,
    out: Value,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[Size],
    padding: list[Size],
    dilation: list[Size],
    transposed: bool,
    output_padding: list[Size],
    groups: int,
) -> Value:
    if not out.dtype.is_floating_point or x.rank != weight.rank:
        raise NotConvertibleError("a convolution of integers, or without a batch")
    spatial = x.rank - 2
    wide = [values * spatial if len(values) == 1 else values for values in (stride, padding, dilation, output_padding)]
    attributes: dict[str, Any] = {
        "strides": wide[0],
        "pads": [*wide[1], *wide[1]],
        "dilations": wide[2],
        "group": groups,
    }
    inputs = [x, weight] if bias is None else [x, weight, bias]
    if transposed:
        if any(more >= step for more, step in zip(wide[3], wide[0])):  # type: ignore[operator]
            raise NotConvertibleError("an output padding as large as the stride")  # ONNX Runtime 1.32 fails
        return b.op("ConvTranspose", *inputs, output_padding=wide[3], **attributes)
    return b.op("Conv", *inputs, **attributes)


@converts(aten.avg_pool2d.default)
def _average_pool(
    b: Builder,
    out: Value,
    x: Value,
    kernel: list[Size],
    stride: list[Size],
    padding: list[Size],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Value:
    if x.rank != 4 or ceil_mode or divisor is not None:
        raise NotConvertibleError("an average pool with rounded sizes or a divisor of its own")
    kernel = kernel * 2 if len(kernel) == 1 else kernel
    stride = (stride * 2 if len(stride) == 1 else stride) or kernel
    padding = padding * 2 if len(padding) == 1 else padding
    return b.op(
        "AveragePool",
        x,
        kernel_shape=kernel,
        strides=stride,
        pads=[*padding, *padding],
        count_include_pad=int(count_include_pad),
    )


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
