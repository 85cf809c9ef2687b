"""Compare the values of two stored tensors, across dtypes, some elements at a time."""

from __future__ import annotations

import numpy as np

from ort_zero.checkpoint.files.casting import cast
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.pieces import overlaps
from ort_zero.checkpoint.records import Tensor

_STEP = 1 << 18


def same_values(folder: Folder, one: Tensor, other: Tensor, start: int = 0, end: int | None = None) -> bool:
    """Return True if two tensors of a folder hold the same values, in a range of elements.

    An fp32 master is rounded before it is compared with its 16-bit copy, in which any value may stand for NaN. Both
    tensors are read up to the first difference.

    Args:
        one: a row-major tensor; the more precise tensor if the dtypes differ.
        end: end of the range, exclusive; None for the end of the tensors.
    """
    if one.shape != other.shape or one.strides is not None or other.strides is not None:
        return False
    if one.dtype != other.dtype and (one.dtype != "F32" or other.dtype not in ("F16", "BF16")):
        return False
    end = one.elements if end is None else end
    for begin in range(start, end, _STEP):
        raw, other_raw = (_elements(folder, tensor, begin, min(begin + _STEP, end)) for tensor in (one, other))
        if one.dtype == other.dtype:
            same = raw == other_raw
        else:
            rounded = bytearray(len(other_raw))
            cast(raw, one.dtype, other.dtype, rounded)
            equal = np.frombuffer(rounded, np.uint16) == np.frombuffer(other_raw, np.uint16)
            same = bool(np.all(equal | np.isnan(np.frombuffer(raw, np.float32))))
        if not same:
            return False
    return True


def is_constant(folder: Folder, tensor: Tensor) -> bool:
    """Return True if all elements of a row-major tensor are equal; reads up to the first different one."""
    first = b""
    for begin in range(0, tensor.elements, _STEP):
        raw = _elements(folder, tensor, begin, min(begin + _STEP, tensor.elements))
        first = first or bytes(raw[: itemsize(tensor.dtype)])
        if raw != first * (len(raw) // len(first)):
            return False
    return True


def _elements(folder: Folder, tensor: Tensor, start: int, stop: int) -> bytearray:
    size = itemsize(tensor.dtype)
    data = bytearray((stop - start) * size)
    for piece, first, length in overlaps(tensor, start, stop - start):
        at = (piece.start + first - start) * size
        folder.read_into(piece.file, piece.offset + first * size, memoryview(data)[at : at + length * size])
    return data
