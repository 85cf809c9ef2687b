"""Cast raw bytes between floating-point dtypes and search them for NaN and inf, with numpy and torch's exact results.

numpy has no bfloat16. A bfloat16 is the upper half of a float32, so rounding to the nearest even value is an addition
of integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_UNSIGNED: dict[int, np.dtype] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_NATIVE: dict[str, np.dtype] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_BLOCK = 1 << 16
"""Number of elements that are cast at a time, so that intermediate results stay in the processor's cache."""


_INFINITIES = {
    "F64": (8, 0x7FF0 << 48),
    "F32": (4, 0x7F80 << 16),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7F),  # F8_E4M3 has NaN but no inf
}
"""Size in bytes, and the smallest bits, without the sign, of a value that is NaN or inf."""


def all_finite(data: Any, code: str) -> bool:
    """Return True if no element is NaN or inf; always True for dtypes without NaN and inf."""
    size, bits = _INFINITIES.get(code, (0, 0))
    values = as_integers(data, size) if size else None
    if values is None or not values.size:
        return True
    # compared as integers: the largest positive value, and the negative value of the largest magnitude
    return bool(values.view(f"<i{size}").max() < bits and values.max() < bits | 1 << (8 * size - 1))


def as_integers(data: Any, size: int) -> np.ndarray:
    """Return bytes as a 1-D array of unsigned integers of `size` bytes each, without a copy."""
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, _UNSIGNED[size])


def cast(data: Any, source: str, code: str, out: Any) -> None:
    """Cast elements between F16, BF16, F32 and F64; values too large for `code` become inf, NaN stays NaN.

    `data` is a buffer or an array of unsigned integers of the element size, `out` a writable buffer.
    """
    size = 2 if source == "BF16" else _NATIVE[source].itemsize
    values = as_integers(data, size)
    result = np.frombuffer(out, _UNSIGNED[2] if code == "BF16" else _NATIVE[code])
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, values.size, _BLOCK):
            _cast_block(values[begin : begin + _BLOCK], source, code, result[begin : begin + _BLOCK])


def _cast_block(values: np.ndarray, source: str, code: str, out: np.ndarray) -> None:
    if source == "BF16":
        wide = values.astype("<u4")
        np.left_shift(wide, 16, out=wide)
        floats = wide.view("<f4")
    else:
        floats = values.view(_NATIVE[source])
    if source == "F64" and code in ("F16", "BF16"):
        floats = floats.astype("<f4")  # torch rounds twice too
    if code == "BF16":
        _round_to_bf16(floats.astype("<f4", copy=False), out)
    else:
        out[:] = floats


def _round_to_bf16(floats: np.ndarray, out: np.ndarray) -> None:
    bits = floats.view("<u4")
    rounded = np.right_shift(bits, 16)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    out[:] = rounded
    if not all_finite(bits, "F32"):
        nan = np.isnan(floats)  # the addition may have turned a NaN into inf or zero
        out[nan] = np.right_shift(bits[nan], 16) | 0x40


def rows_of(data: Any, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return a view of bytes as an array of unsigned integers with the shape and strides of a tensor."""
    return np.ndarray(shape, _UNSIGNED[size], data, 0, tuple(size * stride for stride in strides))
