"""Convert arithmetic by elements, comparisons, logic and casts."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compat.torch_compile import promoted_dtype
from ort_zero.compile.conversion.fragments import Builder, Dim, NotConvertibleError, Value
from ort_zero.compile.conversion.registry import converts, overload, overloads

aten = torch.ops.aten


def promoted(*values: Any) -> torch.dtype:
    """Return the dtype in which PyTorch computes with these tensors and numbers."""
    stand_ins = [
        torch.empty((1,) * v.rank, dtype=v.dtype, device="meta")
        if isinstance(v, Value)
        else (1 if isinstance(v, Dim) else v)
        for v in values
    ]
    return promoted_dtype(*stand_ins)


def _refuse_bool(dtype: torch.dtype) -> None:
    if dtype is torch.bool:
        raise NotConvertibleError("arithmetic with bool")


def _scaled(b: Builder, value: Value, factor: Any, dtype: torch.dtype) -> Value:
    return value if factor == 1 else b.op("Mul", value, b.number(factor, dtype))


def _binary(operator: str, *overloads: Any) -> None:
    @converts(*overloads)
    def convert(b: Builder, out: Value, x: Any, y: Any, alpha: Any = 1, *rest: Any) -> Value:
        _refuse_bool(out.dtype)
        second = _scaled(b, b.number(y, out.dtype), alpha, out.dtype)
        return b.op(operator, b.number(x, out.dtype), second)


_binary("Add", aten.add.Tensor, aten.add.Scalar)
_binary("Sub", aten.sub.Tensor, aten.sub.Scalar)
_binary("Mul", aten.mul.Scalar)
_binary("Div", aten.div.Tensor, aten.div.Scalar)


@converts(aten.mul.Tensor)
def _multiply(b: Builder, out: Value, x: Any, y: Any) -> Value:
    if out.dtype is torch.bool:
        return b.op("And", b.number(x, out.dtype), b.number(y, out.dtype))
    return b.op("Mul", b.number(x, out.dtype), b.number(y, out.dtype))


def _extreme(operator: str, name: str) -> None:
    @converts(overload(name))
    def convert(b: Builder, out: Value, x: Value, y: Value) -> Value:
        _refuse_bool(out.dtype)
        return b.op(operator, b.cast(x, out.dtype), b.cast(y, out.dtype))


_extreme("Max", "maximum")
_extreme("Min", "minimum")


@converts(aten.pow.Tensor_Scalar)
def _power(b: Builder, out: Value, x: Value, exponent: Any) -> Value:
    if not out.dtype.is_floating_point:
        raise NotConvertibleError("a power of integers")
    base = b.cast(x, out.dtype)
    if exponent == 2:
        return b.op("Mul", base, base)
    if exponent == 3:
        return b.op("Mul", base, b.op("Mul", base, base))
    if exponent == 0.5:
        return b.op("Sqrt", base)
    if exponent in (-0.5, -1, -2):
        divisor = {-0.5: lambda: b.op("Sqrt", base), -1: lambda: base, -2: lambda: b.op("Mul", base, base)}[exponent]()
        return b.op("Reciprocal", divisor)
    return b.op("Pow", base, b.number(exponent, out.dtype))


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _power_of_tensors(b: Builder, out: Value, x: Any, y: Any) -> Value:
    if not out.dtype.is_floating_point:
        raise NotConvertibleError("a power of integers")
    return b.op("Pow", b.number(x, out.dtype), b.number(y, out.dtype))


# -- comparisons and logic ---------------------------------------------------------------------------------------------


def _comparison(operator: str, name: str, negated: bool = False) -> None:
    @converts(overload(name, "Tensor"), overload(name, "Scalar"))
    def convert(b: Builder, out: Value, x: Value, y: Any) -> Value:
        if isinstance(y, float) and not x.dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        else:
            dtype = promoted(x, y)
        if dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) and operator != "Equal":
            x, dtype = b.cast(x, torch.int32), torch.int32
            y = b.cast(y, torch.int32) if isinstance(y, Value) else int(y)
        result = b.op(operator, b.number(x, dtype), b.number(y, dtype))
        return b.op("Not", result) if negated else result


_comparison("Equal", "eq")
_comparison("Equal", "ne", negated=True)
_comparison("Less", "lt")
_comparison("LessOrEqual", "le")
_comparison("Greater", "gt")
_comparison("GreaterOrEqual", "ge")


def _logic(operator: str, name: str) -> None:
    @converts(*overloads(f"logical_{name} bitwise_{name}.Tensor bitwise_{name}.Scalar"))
    def convert(b: Builder, out: Value, x: Any, y: Any) -> Value:
        if out.dtype is not torch.bool:
            raise NotConvertibleError("logic by bits of integers")
        return b.op(operator, truth(b, x), truth(b, y))


def truth(b: Builder, value: Any) -> Value:
    """Return a number or a tensor as bool: True where an element differs from 0."""
    if not isinstance(value, Value):
        return b.constant(bool(value), torch.bool)
    if value.dtype is torch.bool:
        return value
    return b.op("Not", b.op("Equal", value, b.constant(0, value.dtype)))


_logic("And", "and")
_logic("Or", "or")
_logic("Xor", "xor")


@converts(aten.logical_not.default)
def _not(b: Builder, out: Value, x: Value) -> Value:
    return b.op("Not", truth(b, x))


@converts(aten.bitwise_not.default)
def _bitwise_not(b: Builder, out: Value, x: Value) -> Value:
    if x.dtype is not torch.bool:
        raise NotConvertibleError("logic by bits of integers")
    return b.op("Not", x)


@converts(aten.isnan.default)
def _is_nan(b: Builder, out: Value, x: Value) -> Value:
    if not x.dtype.is_floating_point:
        raise NotConvertibleError("a test of integers for NaN")
    return b.op("IsNaN", x)


@converts(aten.isinf.default)
def _is_infinite(b: Builder, out: Value, x: Value) -> Value:
    if not x.dtype.is_floating_point:
        raise NotConvertibleError("a test of integers for infinity")
    return b.op("IsInf", x)


@converts(aten.where.self)
def _where(b: Builder, out: Value, condition: Value, x: Value, y: Value) -> Value:
    return b.op("Where", truth(b, condition), b.cast(x, out.dtype), b.cast(y, out.dtype))


@converts(overload("_to_copy"))
def _copy_to(b: Builder, out: Value, x: Value, *rest: Any) -> Value:
    return _written_cast(b, x, out.dtype)


@converts(aten.copy.default)
def _copy_into(b: Builder, out: Value, x: Value, source: Value, *rest: Any) -> Value:
    return b.expand(_written_cast(b, source, out.dtype), out.shape)


def _written_cast(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """Return `x` in another dtype, rounded, as a program writes it; NaN and large numbers have no rule as integers."""
    if dtype is torch.bool:
        return truth(b, x)
    if x.dtype.is_floating_point and not dtype.is_floating_point:
        raise NotConvertibleError("a cast from floats to integers")
    return b.rounded(x, dtype) if dtype.is_floating_point else b.cast(x, dtype)


# -- functions of one element ------------------------------------------------------------------------------------------


def _unary(operator: str, name: str) -> None:
    @converts(overload(name))
    def convert(b: Builder, out: Value, x: Value) -> Value:
        if not out.dtype.is_floating_point:
            raise NotConvertibleError("a function of integers")
        return b.op(operator, b.cast(x, out.dtype))


for _name in "exp log tanh erf sigmoid sin cos atan sqrt reciprocal floor ceil round".split():
    _unary(_name.capitalize(), _name)


def _sign(operator: str, name: str) -> None:
    @converts(overload(name))
    def convert(b: Builder, out: Value, x: Value) -> Value:
        _refuse_bool(out.dtype)
        return b.op(operator, x)


_sign("Neg", "neg")
_sign("Abs", "abs")


@converts(aten.sign.default)
def _sign_of(b: Builder, out: Value, x: Value) -> Value:
    _refuse_bool(out.dtype)
    return b.op("Where", b.op("IsNaN", x), b.constant(0, x.dtype), b.op("Sign", x)) if _floats(x) else b.op("Sign", x)


def _floats(x: Value) -> bool:
    return x.dtype.is_floating_point


@converts(aten.rsqrt.default)
def _rsqrt(b: Builder, out: Value, x: Value) -> Value:
    return b.op("Reciprocal", b.op("Sqrt", b.cast(x, out.dtype)))


@converts(aten.clamp.default, aten.clamp.Tensor)
def _clamp(b: Builder, out: Value, x: Value, low: Any, high: Any) -> Value:
    _refuse_bool(out.dtype)
    result = b.cast(x, out.dtype)
    if low is not None:
        result = b.op("Max", result, b.number(low, out.dtype))
    if high is not None:
        result = b.op("Min", result, b.number(high, out.dtype))
    return result
