"""Convert views, copies and look-ups by index.

Within a segment views are nodes, between segments PyTorch makes them of their base. Look-ups are those whose negative
indices count from the end; others raise for one in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compile.conversion.fragments import Builder, NotConvertibleError, Size, Value
from ort_zero.compile.conversion.registry import converts, overload, overloads

aten = torch.ops.aten

VIEWS = overloads(
    "_conj _neg_view alias as_strided diagonal expand imag permute real reshape select.int slice.Tensor "
    "split_with_sizes squeeze.dims unfold unsqueeze view view.dtype view_as_complex view_as_real"
)
"""Overloads whose results share memory with the first argument, in PyTorch. They cost nothing there."""


@converts(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dims)
def _reshape(b: Builder, out: Value, x: Value, *rest: Any) -> Value:
    return b.reshape(x, out.shape)


@converts(aten.permute.default)
def _permute(b: Builder, out: Value, x: Value, dims: list[int]) -> Value:
    return b.op("Transpose", x, perm=[dim % x.rank for dim in dims]) if x.rank else x


@converts(aten.expand.default)
def _expand(b: Builder, out: Value, x: Value, *rest: Any) -> Value:
    return b.expand(x, out.shape)


@converts(aten.alias.default, aten.clone.default, overload("lift_fresh_copy"))
def _same(b: Builder, out: Value, x: Value, *rest: Any) -> Value:
    return x


@converts(aten.slice.Tensor)
def _slice(b: Builder, out: Value, x: Value, dim: int, start: Any, end: Any, step: Any) -> Value:
    dim %= x.rank
    if out.shape == x.shape and step == 1:
        return x
    if not isinstance(step, int):
        raise NotConvertibleError("a slice with a step that changes")
    bounds = [0 if start is None else start, _END if end is None else end]
    first, last = (b.size(min(bound, _END) if isinstance(bound, int) else bound) for bound in bounds)
    return b.op("Slice", x, first, last, b.constant([dim], torch.int64), b.constant([step], torch.int64))


_END = (1 << 62) - 1
"""The end of a slice up to the end; ATen writes the largest 64-bit integer, which a sum would overflow."""


@converts(aten.select.int)
def _select(b: Builder, out: Value, x: Value, dim: int, index: Any) -> Value:
    scalar = (
        b.constant(index, torch.int64)
        if isinstance(index, int)
        else b.op("Reshape", b.size(index), b.constant([], torch.int64, (0,)))
    )
    return b.op("Gather", x, scalar, axis=dim % x.rank)


@converts(aten.split_with_sizes.default)
def _split_with_sizes(b: Builder, out: Any, x: Value, sizes: list[Size], dim: int) -> tuple[Value, ...]:
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) == 1:
        return (x,)
    return b.ops("Split", len(parts), x, b.vector([part.shape[dim % x.rank] for part in parts]), axis=dim % x.rank)


@converts(aten.cat.default)
def _concatenate(b: Builder, out: Value, tensors: list[Value], dim: int) -> Value:
    if any(tensor.rank != out.rank for tensor in tensors):
        raise NotConvertibleError("tensors of unequal numbers of dimensions in one concatenation")
    return b.op("Concat", *(b.cast(tensor, out.dtype) for tensor in tensors), axis=dim % out.rank)


@converts(aten.constant_pad_nd.default)
def _pad(b: Builder, out: Value, x: Value, padding: list[Size], value: Any) -> Value:
    amounts = [size for size in padding if isinstance(size, int) and size >= 0]
    if out.dtype is torch.bool or len(amounts) != len(padding):
        raise NotConvertibleError("a padding that changes, or below 0, or of bool")
    pairs = [(0, 0)] * (x.rank - len(amounts) // 2) + list(zip(amounts[::2], amounts[1::2]))[::-1]
    return _padded(b, x, [before for before, _ in pairs], [after for _, after in pairs], value)


def _padded(b: Builder, x: Value, before: list[int], after: list[int], value: Any) -> Value:
    """Return `x` with more elements around it; amounts are for all dimensions.

    Pad's input of axes is not used: ONNX Runtime (1.19 to 1.32) moves transpositions over Pad as if it were not there.
    """
    return b.op("Pad", x, b.constant([*before, *after], torch.int64), b.number(value, x.dtype))


@converts(aten.repeat.default)
def _repeat(b: Builder, out: Value, x: Value, times: list[Size]) -> Value:
    if x.rank == 0 and not times:
        return x  # ONNX Runtime 1.22 tiles no tensor without dimensions
    wide: list[Size] = [1] * (len(times) - x.rank)
    return b.op("Tile", b.reshape(x, [*wide, *x.shape]) if wide else x, b.vector(times))


@converts(aten.slice_backward.default)
def _slice_backward(
    b: Builder, out: Value, gradient: Value, sizes: Any, dim: int, start: Any, end: Any, step: Any
) -> Value:
    dim %= out.rank
    length, width = out.shape[dim], gradient.shape[dim]
    if not (isinstance(length, int) and isinstance(width, int) and isinstance(start, int) and step == 1):
        raise NotConvertibleError("the gradient of a slice that changes or has steps")
    start = min(max(start + length if start < 0 else start, 0), length)
    before, after = [0] * out.rank, [0] * out.rank
    before[dim], after[dim] = start, length - start - width
    return _padded(b, gradient, before, after, 0)


@converts(aten.flip.default)
def _flip(b: Builder, out: Value, x: Value, dims: list[int]) -> Value:
    if not x.rank or not dims:
        return x
    axes = [dim % x.rank for dim in dims]
    ends = [-_END] * len(axes)
    return b.op(
        "Slice", x, *(b.constant(values, torch.int64) for values in ([-1] * len(axes), ends, axes, [-1] * len(axes)))
    )


@converts(aten.index.Tensor)
def _index(b: Builder, out: Value, x: Value, indices: list[Value | None]) -> Value:
    lookups = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(lookups) != 1 or lookups[0][1].dtype not in (torch.int64, torch.int32):
        raise NotConvertibleError("a look-up by several tensors or by a mask")
    dim, index = lookups[0]
    return b.op("Gather", x, index, axis=dim)
