"""Store the statistics of one tensor in a row of float64, and merge the rows of a tensor's parts.

A row has the :data:`COLUMNS`, then the first values, then the sketch. Tensors with fewer first values have NaN there.
Counts are exact up to 2**53. NaN and inf are counted, and left out of all other numbers. A tensor without finite
values, such as an empty one, has min, max, mean and std NaN, abs_mean and l2 0.

The sketch is a count sketch (Charikar, Chen, Farach-Colton 2002): element ``i`` of the flattened tensor is added to
number ``i % SKETCH`` with a sign that depends on ``i`` alone. The l2 norm of the difference of two sketches estimates
the l2 norm of the difference of two tensors of one shape, within about 10 %. The sketch of a tensor is the sum of the
sketches of its disjoint parts.
"""

from __future__ import annotations

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

    Args:
        rows: float64 [parts, ..., :data:`WIDTH`], the parts in the order of their elements; a missing part is zeros.

    Returns:
        float64 [..., :data:`WIDTH`].
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
    merged[..., FIRST_COLUMNS] = _first_of(rows)
    return merged


def _first_of(rows: np.ndarray) -> np.ndarray:
    """Return the first values of whole tensors, float64 [..., :data:`FIRST`]."""
    has_value = np.arange(FIRST) < rows[..., ELEMENTS, None]
    shape = (*rows.shape[1:-1], len(rows) * FIRST)
    has_value, values = (np.moveaxis(of, 0, -2).reshape(shape) for of in (has_value, rows[..., FIRST_COLUMNS]))
    order = np.argsort(~has_value, axis=-1, kind="stable")[..., :FIRST]
    has_value, values = (np.take_along_axis(of, order, axis=-1) for of in (has_value, values))
    return np.where(has_value, values, np.nan)
