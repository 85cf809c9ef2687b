"""Store the statistics of one tensor in a row of float64, and merge the rows of a tensor's parts.

A row has the :data:`COLUMNS`, then the first values, then the sketch. Tensors with fewer first values have NaN there.
Counts are exact up to 2**53. NaN and inf are counted, and left out of all other numbers. A tensor without finite
values, such as an empty one, has min, max, mean and std NaN, abs_mean and l2 0.

The sketch is a count sketch (Charikar, Chen, Farach-Colton 2002): element ``i`` of the flattened tensor is added to
number ``i % SKETCH`` with a sign that depends on ``i`` alone. The l2 norm of the difference of two sketches estimates
the l2 norm of the difference of two tensors of one shape, within about 10 %. The sketch of a tensor is the sum of the
sketches of its disjoint parts. The sign of an element in block ``b = i // BLOCK`` and column ``j = i % SKETCH`` is
``T[i % BLOCK] * B(b, j)``, where

* ``B(b, j)`` is -1 if bit ``j`` of ``splitmix64(b)`` is set, else 1;
* ``T[SKETCH * r + j]`` is -1 if bit ``j`` of ``splitmix64(2**64 - 1 - r)`` is set, else 1.

NaN and inf are added as 0. A complex number is two elements, its real part and its imaginary part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SKETCH = 64
"""Number of numbers in a sketch."""
FIRST = 8
"""Number of first values of a tensor in its statistics."""
COLUMNS = ("elements", "min", "max", "mean", "std", "abs_mean", "l2", "negative", "positive", "zero", "nan", "inf")
"""Names of the first numbers of a row. ``elements`` counts the measured elements, of the tensor or of a sample; ``std``
is the standard deviation of the population, as ``numpy.std`` returns it; ``l2`` is the Euclidean norm."""
COUNTS = frozenset({"elements", "negative", "positive", "zero", "nan", "inf"})
"""Names of the columns that are whole numbers."""
# numba compiles these constants into its cached code, and compiles again only when kernels.py itself changes
ELEMENTS, MIN, MAX, MEAN, STD, ABS_MEAN, L2, NEGATIVE, POSITIVE, ZERO, NAN, INF = range(len(COLUMNS))
FIRST_AT = len(COLUMNS)
FIRST_COLUMNS = slice(FIRST_AT, FIRST_AT + FIRST)
SKETCH_AT = FIRST_COLUMNS.stop
SKETCH_COLUMNS = slice(SKETCH_AT, SKETCH_AT + SKETCH)
WIDTH = SKETCH_COLUMNS.stop
"""Number of float64 values in a row."""

_SUMS = [*(COLUMNS.index(name) for name in sorted(COUNTS)), *range(SKETCH_AT, WIDTH)]


def merge(rows: np.ndarray) -> np.ndarray:
    """Merge the rows of the disjoint parts of tensors into the rows of the whole tensors.

    `rows` is float64 [parts, ..., :data:`WIDTH`], where a missing part is zeros; the result is float64
    [..., :data:`WIDTH`]. First values are those of the first part.
    """
    merged = np.zeros(rows.shape[1:])
    merged[..., _SUMS] = rows[..., _SUMS].sum(axis=0)
    finite = rows[..., ELEMENTS] - rows[..., NAN] - rows[..., INF]
    has_values = finite > 0
    count = finite.sum(axis=0)
    has_mean = count > 0

    def total(values: np.ndarray) -> np.ndarray:
        return np.where(has_values, values, 0.0).sum(axis=0)

    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total(finite * rows[..., MEAN]) / count
        # sums of squared deviations: the difference of the mean square and the squared mean would cancel
        squares = total(finite * (rows[..., STD] ** 2 + (rows[..., MEAN] - mean) ** 2))
        values = {
            MIN: np.where(has_values, rows[..., MIN], np.inf).min(axis=0),
            MAX: np.where(has_values, rows[..., MAX], -np.inf).max(axis=0),
            MEAN: mean,
            STD: np.sqrt(squares / count),
            ABS_MEAN: total(finite * rows[..., ABS_MEAN]) / count,
            L2: np.sqrt(total(rows[..., L2] ** 2)),
        }
    for column, of_values in values.items():
        merged[..., column] = np.where(has_mean, of_values, 0.0 if column in (ABS_MEAN, L2) else np.nan)
    merged[..., FIRST_COLUMNS] = rows[0, ..., FIRST_COLUMNS]
    return merged


# --- the signs of a sketch --------------------------------------------------------------------------------------------

BLOCK = 4096
"""Number of elements in a block, whose signs come from one table: a block and the table fit into the L1 cache."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def splitmix64(number: Any) -> Any:
    """Return the 64 pseudo-random bits of an unsigned 64-bit number, or of each number in an array."""
    mixed = number + _STEP
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


def signs_of(words: np.ndarray) -> np.ndarray:
    """Turn the bits of 64-bit words into signs, float64 [words, SKETCH], lowest bit first: -1 for a set bit, else 1."""
    bits = (words[:, None] >> np.arange(SKETCH, dtype=np.uint64)) & _ONE
    return 1 - 2 * bits.astype(np.float64)


def signs_of_blocks(first: int, count: int) -> np.ndarray:
    """Return ``B(b, j)`` for `count` blocks, beginning with block `first`, float64 [count, SKETCH]."""
    return signs_of(splitmix64(np.arange(first, first + count, dtype=np.uint64)))


TABLE = signs_of(splitmix64(~np.arange(BLOCK // SKETCH, dtype=np.uint64)))
"""The table ``T``, float64 [BLOCK // SKETCH, SKETCH]."""
