"""Compute the error of each pair of records: the distance of its two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import PairedTables
from ort_zero.statistics.records import Table

NO_NUMBER = 4.0
"""The error of a pair without a number, such as NaN in one run alone; larger than all errors (at most 2)."""
SAME, SHAPE, NAN, NUMERIC = range(4)
KIND_NAMES = ("", "shape", "nan", "numeric")


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """The distances of all pairs of a step."""

    error: np.ndarray
    """l2 norm of the difference relative to the larger norm, estimated from the sketches, and at least :attr:`norm`;
    :data:`NO_NUMBER` if the shapes differ or one has NaN."""
    norm: np.ndarray
    """Difference of the norms, relative to the larger norm."""
    kind: np.ndarray
    """Kind of the difference, ``SHAPE``, ``NAN`` or ``NUMERIC``; ``SAME`` for pairs that are not compared."""
    dtype: np.ndarray
    """True where the dtypes differ."""
    sampled: np.ndarray
    """True where the two runs sampled different elements of a tensor, which cannot be compared."""


def distances(tables: PairedTables) -> Distances:
    """Compute the distances of all pairs of a step."""
    pairs, a, b = tables.pairs, tables.a, tables.b
    rows_a, rows_b = pairs.measured_a, pairs.measured_b
    norms = _of_larger_norm(abs(a.l2[rows_a] - b.l2[rows_b]), a, b, rows_a, rows_b)
    error = np.maximum(sketch_errors(a, b, rows_a, rows_b), norms)
    shape = unequal(a.shape, b.shape, rows_a, rows_b)
    dtype = unequal(a.dtype, b.dtype, rows_a, rows_b)
    not_finite = (a.nan[rows_a] != b.nan[rows_b]) | (a.inf[rows_a] != b.inf[rows_b]) | ~np.isfinite(error)
    sampled = (a.elements[rows_a] != b.elements[rows_b]) & ~shape
    kind = np.select([~pairs.comparable | sampled, shape, not_finite], [SAME, SHAPE, NAN], NUMERIC)
    error = np.select([kind == SAME, kind == NUMERIC], [0.0, np.minimum(error, NO_NUMBER)], NO_NUMBER)
    return Distances(
        error=error,
        norm=np.where(kind == NUMERIC, norms, 0.0),
        kind=kind,
        dtype=dtype & pairs.comparable,
        sampled=sampled & pairs.comparable,
    )


def sketch_errors(a: Table, b: Table, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    """Return the estimated l2 norms of the differences of pairs of tensors, relative to the larger norm.

    Args:
        a: table of the first tensors.
        b: table of the second tensors.
        rows_a: int64 [pairs], rows of `a` with the statistics.
        rows_b: int64 [pairs], rows of `b` with the statistics.

    Returns:
        float64 [pairs]; 0 where both norms are 0.
    """
    gap = a.sketch[rows_a] - b.sketch[rows_b]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.sqrt(np.einsum("ij,ij->i", gap, gap))
    return _of_larger_norm(difference, a, b, rows_a, rows_b)


def _of_larger_norm(difference: np.ndarray, a: Table, b: Table, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    norm = np.maximum(a.l2[rows_a], b.l2[rows_b])
    with np.errstate(invalid="ignore", over="ignore"):
        return np.divide(difference, norm, out=np.zeros(len(norm)), where=norm > 0)


def unequal(a: Sequence, b: Sequence, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    """Return True for each pair of rows where two lists differ."""
    return np.fromiter((a[i] != b[j] for i, j in zip(rows_a.tolist(), rows_b.tolist())), bool, len(rows_a))
