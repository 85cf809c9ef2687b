"""Convert matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Value
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
