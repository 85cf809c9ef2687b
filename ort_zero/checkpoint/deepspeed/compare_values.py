"""Compare the values of two stored tensors, across dtypes, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Tensor

_STEP = 1 << 18
"""Number of elements that are compared at a time."""


def same_values(folder: Folder, one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of a folder hold the same values.

    An fp32 master is rounded before it is compared with its 16-bit copy. Both tensors are read up to the first
    difference.

    Args:
        folder: folder of the files of both tensors.
        one: a row-major tensor; the more precise tensor if the dtypes differ.
        other: a row-major tensor of the same shape.
    """
    if one.shape != other.shape or one.strides is not None or other.strides is not None:
        return False
    for start in range(0, one.elements, _STEP):
        stop = min(start + _STEP, one.elements)
        raw, other_raw = (_elements(folder, t, start, stop) for t in (one, other))
        expected = raw if one.dtype == other.dtype else _rounded(raw, one.dtype, other.dtype)
        if expected is None or expected.tobytes() != other_raw.tobytes():
            return False
    return True


def is_constant(folder: Folder, tensor: Tensor) -> bool:
    """Return True if all elements of a row-major tensor are equal; reads up to the first different element."""
    size = itemsize(tensor.dtype)
    first = b""
    for start in range(0, tensor.elements, _STEP):
        raw = _elements(folder, tensor, start, min(start + _STEP, tensor.elements)).tobytes()
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
    """Return the bytes of fp32 values rounded to a 16-bit dtype, as PyTorch rounds; None for other dtypes."""
    if dtype != "F32":
        return None
    if to == "F16":
        with np.errstate(over="ignore"):
            return raw.view(np.float32).astype(np.float16)
    if to != "BF16":
        return None
    bits = raw.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(raw.view(np.float32)), np.uint16(0x7FC0), rounded).astype(np.uint16)
