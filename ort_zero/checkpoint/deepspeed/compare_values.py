"""Compare the values of two stored tensors, across dtypes, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Tensor

_STEP = 1 << 18
"""Number of elements that are compared at a time."""


def same_values(folder: Folder, one: Tensor, other: Tensor, start: int = 0, end: int | None = None) -> bool:
    """Return True if two tensors of a folder hold the same values, in a range of elements.

    An fp32 master is rounded before it is compared with its 16-bit copy, in which any value may stand for NaN. Both
    tensors are read up to the first difference.

    Args:
        folder: folder of the files of both tensors.
        one: a row-major tensor; the more precise tensor if the dtypes differ.
        other: a row-major tensor of the same shape.
        start: first element of the range.
        end: end of the range, exclusive; None for the end of the tensors.
    """
    if one.shape != other.shape or one.strides is not None or other.strides is not None:
        return False
    end = one.elements if end is None else end
    for begin in range(start, end, _STEP):
        raw, other_raw = (_elements(folder, t, begin, min(begin + _STEP, end)) for t in (one, other))
        if one.dtype == other.dtype:
            same = raw.tobytes() == other_raw.tobytes()
        else:
            expected = _rounded(raw, one.dtype, other.dtype)
            same = expected is not None and bool(
                np.all((expected == other_raw.view(np.uint16)) | np.isnan(raw.view(np.float32)))
            )
        if not same:
            return False
    return True


def is_constant(folder: Folder, tensor: Tensor, start: int = 0, end: int | None = None) -> bool:
    """Return True if all elements in a range of a row-major tensor are equal; reads up to the first different one."""
    size = itemsize(tensor.dtype)
    first = b""
    end = tensor.elements if end is None else end
    for begin in range(start, end, _STEP):
        raw = _elements(folder, tensor, begin, min(begin + _STEP, end)).tobytes()
        first = first or raw[:size]
        if raw != first * (len(raw) // size):
            return False
    return True


def _elements(folder: Folder, tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Return the bytes of the elements `start` to `stop`."""
    size = itemsize(tensor.dtype)
    data = bytearray((stop - start) * size)
    for name, offset, length, at in _parts(tensor, start, stop, size):
        folder.read_into(name, offset, memoryview(data)[at : at + length])
    return np.frombuffer(data, np.uint8)


def _parts(tensor: Tensor, start: int, stop: int, size: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (file, offset in the file, length, offset in the range) in bytes for each piece of a range of elements."""
    for piece in tensor.pieces:
        begin, end = max(start, piece.start), min(stop, piece.start + piece.length // size)
        if begin < end:
            yield piece.file, piece.offset + (begin - piece.start) * size, (end - begin) * size, (begin - start) * size


def _rounded(raw: np.ndarray, dtype: str, to: str) -> np.ndarray | None:
    """Return the bits of fp32 values but NaN, rounded to a 16-bit dtype as PyTorch rounds; None for other dtypes."""
    if dtype != "F32":
        return None
    if to == "F16":
        with np.errstate(over="ignore"):
            return raw.view(np.float32).astype(np.float16).view(np.uint16)
    if to != "BF16":
        return None
    bits = raw.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
