"""Convert activation functions and their gradients, softmax among them."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import MICROSOFT, Builder, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts, overload

aten = torch.ops.aten


def _require_float(out: Value) -> None:
    if not out.dtype.is_floating_point:
        raise NotConvertibleError("an activation of integers")


@converts(aten.relu.default)
def _relu(b: Builder, out: Value, x: Value) -> Value:
    _require_float(out)
    return b.op("Max", x, b.constant(0, x.dtype))


@converts(overload("threshold_backward"))
def _threshold_backward(b: Builder, out: Value, gradient: Value, x: Value, threshold: Any) -> Value:
    _require_float(out)
    below = b.op("LessOrEqual", x, b.number(threshold, x.dtype))
    return b.op("Where", below, b.constant(0, out.dtype), gradient)


@converts(aten.gelu.default)
def _gelu(b: Builder, out: Value, x: Value, approximate: str) -> Value:
    if out.dtype is torch.float64:  # ONNX Runtime 1.32 has its constants in float32
        raise NotConvertibleError("a GELU of float64")
    result = b.op("Gelu", x, approximate=approximate)
    if approximate == "tanh" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return result
    # PyTorch's kernel for AVX-512 gives NaN for infinity, and infinity beyond 2**127
    return b.op("Sub", b.op("Add", result, result), result)


@converts(aten.gelu_backward.default)
def _gelu_backward(b: Builder, out: Value, gradient: Value, x: Value, approximate: str) -> Value:
    raise NotConvertibleError("the gradient of GELU: PyTorch has one kernel for it")


@converts(aten.silu.default)
def _silu(b: Builder, out: Value, x: Value) -> Value:
    return b.op("QuickGelu", x, domain=MICROSOFT, alpha=1.0)


@converts(aten.sigmoid_backward.default)
def _sigmoid_backward(b: Builder, out: Value, gradient: Value, result: Value) -> Value:
    slope = b.op("Mul", result, b.op("Sub", b.constant(1, result.dtype), result))
    return b.op("Mul", gradient, slope)


@converts(aten.tanh_backward.default)
def _tanh_backward(b: Builder, out: Value, gradient: Value, result: Value) -> Value:
    slope = b.op("Sub", b.constant(1, result.dtype), b.op("Mul", result, result))
    return b.op("Mul", gradient, slope)


@converts(aten.leaky_relu.default)
def _leaky_relu(b: Builder, out: Value, x: Value, slope: Any) -> Value:
    _require_float(out)
    return b.op("LeakyRelu", x, alpha=float(slope))


@converts(aten.elu.default)
def _elu(b: Builder, out: Value, x: Value, alpha: Any, scale: Any, input_scale: Any) -> Value:
    if scale != 1 or input_scale != 1:
        raise NotConvertibleError("a scaled ELU")
    return b.op("Elu", x, alpha=float(alpha))


@converts(aten.hardtanh.default)
def _hardtanh(b: Builder, out: Value, x: Value, low: Any, high: Any) -> Value:
    _require_float(out)
    return b.op("Min", b.op("Max", x, b.number(low, x.dtype)), b.number(high, x.dtype))


@converts(overload("_softmax"))
def _softmax(b: Builder, out: Value, x: Value, dim: int, half_to_float: bool) -> Value:
    if x.rank == 0:
        raise NotConvertibleError("a softmax without dimensions")
    if out.dtype is torch.float64:  # ONNX Runtime 1.32 is exact to 12 digits
        raise NotConvertibleError("a softmax of float64")
    return b.op("Softmax", b.cast(x, out.dtype), axis=dim)


@converts(overload("_log_softmax"))
def _log_softmax(b: Builder, out: Value, x: Value, dim: int, half_to_float: bool) -> Value:
    if x.rank == 0:
        raise NotConvertibleError("a softmax without dimensions")
    if out.dtype is torch.float64:  # ONNX Runtime 1.32 loses NaN
        raise NotConvertibleError("a log-softmax of float64")
    return b.op("LogSoftmax", b.cast(x, out.dtype), axis=dim)


@converts(overload("_softmax_backward_data"))
def _softmax_backward(b: Builder, out: Value, gradient: Value, result: Value, dim: int, dtype: Any) -> Value:
    if result.rank == 0:
        raise NotConvertibleError("a softmax without dimensions")
    product = b.op("Mul", gradient, result)
    total = b.reduce("ReduceSum", product, [dim % result.rank], True)
    return b.op("Sub", product, b.op("Mul", result, total))
