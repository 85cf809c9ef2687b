"""How far the two values of a pair of records are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import PairedTables
from ort_zero.statistics.file_format import Table

NO_NUMBER = 4.0
"""Stands for the error where there is none, NaN against numbers for one; larger than any (at most 2)."""
SAME, SHAPE, NAN, NUMERIC = range(4)
KIND_NAMES = ("", "shape", "nan", "numeric")


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """How far the values of all pairs of a step are apart."""

    error: np.ndarray
    """l2 norm of the difference relative to the larger norm; :data:`NO_NUMBER` where there is none."""
    norm: np.ndarray
    """Difference of the norms, relative to the larger one."""
    kind: np.ndarray
    """How the pair differs if it differs; ``SAME`` if there is nothing to compare."""
    dtype: np.ndarray
    """True where the dtypes differ."""
    sampled: np.ndarray
    """True where the numbers cover different parts of a tensor and cannot be compared."""


def distances(tables: PairedTables) -> Distances:
    """Return how far the values of all pairs are apart."""
    pairs, a, b = tables.pairs, tables.a, tables.b
    rows_a, rows_b = pairs.measured_a, pairs.measured_b
    error = sketch_errors(a, b, rows_a, rows_b)
    norms = _of_larger_norm(abs(a.l2[rows_a] - b.l2[rows_b]), a, b, rows_a, rows_b)
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
        a: where the first tensors are.
        b: where the others are.
        rows_a: int64 [pairs], rows that have statistics.
        rows_b: the same of the others.

    Returns:
        float64 [pairs]; 0 where both norms are.
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
    """Return where two lists differ, row by row."""
    return np.fromiter((a[i] != b[j] for i, j in zip(rows_a.tolist(), rows_b.tolist())), bool, len(rows_a))
