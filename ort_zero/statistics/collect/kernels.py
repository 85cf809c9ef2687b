"""Compile the loops that measure float32 values on the CPU. Importing this module imports numba.

A row that is not complete holds sums: MEAN is the mean of the values so far, STD the sum of squared deviations from
MEAN, ABS_MEAN the sum of magnitudes.

Values are read in blocks of :data:`~.rows.BLOCK`, which stay in the L1 cache. Each loop over a block is one that LLVM
turns into vector instructions: sums of which the order is free, minimum and maximum of integers. Minimum and maximum of
floating point numbers would stay scalar code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ort_zero.statistics import extra
from ort_zero.statistics import rows as column
from ort_zero.statistics.rows import BLOCK, FIRST, FIRST_AT, SKETCH, SKETCH_AT, TABLE, splitmix64

with extra.required():
    import numba
    import numpy as np

Kernel = Callable[[np.ndarray, int, np.ndarray], bool]
"""``kernel(values, offset, row)``: write the statistics of float32 values into a row. `offset` is the flat index of the
first value within its tensor. False: a sum in float32 would not be exact enough, or there are NaN and inf."""

TABLE_32 = TABLE.astype(np.float32).reshape(-1)
"""The signs within a block, float32 [BLOCK]."""
PART = 512
"""Number of values that are summed in float32."""
_ZERO, _ONE = np.float32(0), np.float32(1)
_SMALLEST, _LARGEST = np.int32(-(2**31)), np.int32(2**31 - 1)
_mixed: Any = numba.njit(nogil=True)(splitmix64)
_vectorised = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})


@numba.njit(nogil=True)
def _ordered(bits):
    """Return an integer that orders as the float32 number with these bits does, or the bits of such an integer."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _LARGEST))


@_vectorised
def _sums_of_part(x, bits, centre):
    """Return what :func:`_sums` does, of a part of a block, in float32."""
    total = squares = magnitude = negative = zero = _ZERO
    low, high = _LARGEST, _SMALLEST
    for k in range(x.size):
        deviation = x[k] - centre
        total += deviation
        squares += deviation * deviation
        magnitude += abs(x[k])
        negative += _ONE if x[k] < _ZERO else _ZERO
        zero += _ONE if x[k] == _ZERO else _ZERO
        number = _ordered(bits[k])
        low, high = np.int32(min(low, number)), np.int32(max(high, number))
    return total, squares, magnitude, negative, zero, low, high


@numba.njit(nogil=True)
def _sums(x, bits, centre):
    """Return sums over a block, whose ``bits`` are int32, and its :func:`_ordered` minimum and maximum.

    The sums are those of deviations from the centre, of their squares, of magnitudes, of negative values, of zeros.
    """
    total = squares = magnitude = negative = zero = 0.0
    low, high = _LARGEST, _SMALLEST
    for at in range(0, x.size, PART):
        t, s, m, n, z, lowest, highest = _sums_of_part(x[at : at + PART], bits[at : at + PART], centre)
        total, squares, magnitude = total + t, squares + s, magnitude + m
        negative, zero = negative + n, zero + z
        low, high = min(low, lowest), max(high, highest)
    return total, squares, magnitude, negative, zero, low, high


@_vectorised
def _set_sketch(x, start, columns):
    """Write the sketch of a block into ``columns``; position ``start`` of the block holds ``x[0]``."""
    columns[:] = _ZERO
    head = min(x.size, -start % SKETCH)
    end = head + (x.size - head) // SKETCH * SKETCH
    for at in range(head, end, SKETCH):
        # slices, as numba checks an index that is a sum for negative values and then does not vectorise the loop
        values, signs = x[at : at + SKETCH], TABLE_32[start + at : start + at + SKETCH]
        for j in range(SKETCH):
            columns[j] += values[j] * signs[j]
    for k in range(head):
        columns[(start + k) % SKETCH] += x[k] * TABLE_32[start + k]
    for k in range(end, x.size):
        columns[(start + k) % SKETCH] += x[k] * TABLE_32[start + k]


@numba.njit(nogil=True)
def _add(count, centre, sums, sketch, word, extremes, row):
    """Add the sums over a block of ``count`` values to a row and its extremes (Chan, Golub, LeVeque 1979)."""
    total, squares, magnitude, negative, zero, low, high = sums
    before = row[column.ELEMENTS]
    delta = centre + total / count - row[column.MEAN]
    part = count / (before + count)
    row[column.MEAN] += delta * part
    row[column.STD] += max(squares - total * total / count, 0.0) + delta * delta * before * part
    # if all values have one sign, the magnitudes follow from the deviations, whose sum has a smaller rounding error
    has_one_sign = negative == 0 or negative + zero == count
    row[column.ABS_MEAN] += abs(centre * count + total) if has_one_sign else magnitude
    extremes[0], extremes[1] = min(extremes[0], low), max(extremes[1], high)
    row[column.NEGATIVE] += negative
    row[column.ZERO] += zero
    for j in range(SKETCH):
        sign = 1.0 - 2.0 * np.float64((word >> np.uint64(j)) & np.uint64(1))
        row[SKETCH_AT + j] += sign * sketch[j]
    row[column.ELEMENTS] += count


@numba.njit(nogil=True)
def _add_block(x, bits, start, word, columns, extremes, row):
    """Add a block to a row; return False where float32 is not exact enough."""
    some = min(x.size, SKETCH)
    centre = _ZERO
    for k in range(some):
        centre += x[k]
    centre = centre / np.float32(some)
    sums = _sums(x, bits, centre)
    if sums[0] * sums[0] > 0.5 * sums[1] * x.size:
        # sum again about the mean: with this centre most digits of the variance would cancel
        centre = np.float32(centre + sums[0] / x.size)
        sums = _sums(x, bits, centre)
    # a deviation from a large centre cannot be so small that its square is 0, unless all values are equal
    is_constant = sums[1] == 0 and (abs(centre) > 1e-10 or sums[4] == x.size)
    # within these limits no float32 sum overflows and no relevant square underflows
    if not (sums[1] <= 1e37 and (sums[1] >= 1e-32 * x.size or is_constant)):
        return False
    _set_sketch(x, start, columns)
    _add(x.size, np.float64(centre), sums, columns, word, extremes, row)
    return True


def _measure(x, offset, row):
    """Write the statistics of float32 values into a row, block by block of the sketch; see :data:`Kernel`."""
    row[:] = 0.0
    row[FIRST_AT : FIRST_AT + FIRST] = np.nan
    for k in range(min(FIRST, x.size)):
        row[FIRST_AT + k] = x[k]
    columns = np.empty(SKETCH, np.float32)
    extremes = np.array([_LARGEST, _SMALLEST], np.int32)
    bits = x.view(np.int32)
    at = 0
    while at < x.size:
        start = (offset + at) % BLOCK
        stop = min(at + BLOCK - start, x.size)
        word = _mixed(np.uint64((offset + at) // BLOCK))
        if not _add_block(x[at:stop], bits[at:stop], start, word, columns, extremes, row):
            return False
        at = stop
    count = row[column.ELEMENTS]
    if count == 0:
        row[column.MIN : column.STD + 1] = np.nan
        return True
    for k in range(2):
        extremes[k] = _ordered(extremes[k])
    row[column.MIN], row[column.MAX] = extremes.view(np.float32)
    row[column.POSITIVE] = count - row[column.NEGATIVE] - row[column.ZERO]
    row[column.L2] = math.sqrt(row[column.STD] + count * row[column.MEAN] * row[column.MEAN])
    row[column.STD] = math.sqrt(row[column.STD] / count)
    row[column.ABS_MEAN] /= count
    return True


def compiled() -> Kernel:
    """Return the compiled kernel.

    Numba stores the machine code for other processes if numba's cache folder is writable. The code contains constants
    of :mod:`~ort_zero.statistics.rows`, but numba compiles again only when this file changes.
    """
    values = numba.types.Array(numba.types.float32, 1, "C", readonly=False, aligned=True)
    signature = numba.types.boolean(values, numba.types.int64, numba.types.Array(numba.types.float64, 1, "C"))
    try:
        return numba.njit([signature], nogil=True, cache=True)(_measure)
    except Exception:
        # no cache folder is writable, the disk is full, or stored code is unreadable: compile without the cache
        return numba.njit([signature], nogil=True)(_measure)
