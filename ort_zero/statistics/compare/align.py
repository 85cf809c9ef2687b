"""Pair the rows of two runs' tables that belong to the same tensor of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.layout import Layout
from ort_zero.statistics.records import Phase, Table


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of rows of two tables, in the first run's order of execution, and the rows without a partner."""

    a: Layout
    b: Layout
    row_a: np.ndarray
    row_b: np.ndarray
    measured_a: np.ndarray
    """For each pair, the row of the first table with its statistics; -1 if there are none."""
    measured_b: np.ndarray
    new_value: np.ndarray
    """True where the pair's tensor is new in the step; False where both runs refer to the same earlier pair."""
    reference: np.ndarray
    """For each pair, the first pair with the same tensor: itself, or an earlier pair."""
    comparable: np.ndarray
    """False for gradients that are sums over different uses in the two runs, and for pairs without statistics."""
    gradient: np.ndarray
    """For each pair of the forward phase, the pair of its gradient; -1 if there is none."""
    missing: np.ndarray
    """Rows of the first table without a partner in the second table, in order of execution."""
    extra: np.ndarray
    """Rows of the second table without a partner in the first table, in order of execution."""
    reordered: np.ndarray
    """Pairs of the forward phase whose order differs between the runs."""

    def __len__(self) -> int:
        return len(self.row_a)

    @property
    def phase(self) -> np.ndarray:
        """Phase of each pair, see :class:`~ort_zero.statistics.records.Phase`."""
        return self.a.table.phase[self.row_a]

    @property
    def kind(self) -> np.ndarray:
        """Code of the kind of each pair, see :data:`~.layout.KIND_CODES`."""
        return self.a.kind[self.row_a]


@dataclass(frozen=True, slots=True, eq=False)
class PairedTables:
    """The tables of one step in two runs, and the pairs of their rows.

    The tables have the layouts of `pairs`, but may belong to a later step than the tables in `pairs`.
    """

    pairs: Pairs
    a: Table
    b: Table

    def larger_norm(self) -> np.ndarray:
        """Return for each pair the larger of the two measured l2 norms."""
        return np.maximum(self.a.l2[self.pairs.measured_a], self.b.l2[self.pairs.measured_b])

    def unsampled(self) -> np.ndarray:
        """Return for each pair the expected ratio of the whole tensor's norm to the norm of the measured sample."""
        covered = self.a.elements[self.pairs.measured_a]
        shapes = [self.a.shape[row] for row in self.pairs.row_a.tolist()]
        whole = np.fromiter((math.prod(shape) for shape in shapes), float, len(shapes))
        return np.sqrt(np.maximum(np.divide(whole, covered, out=np.ones(len(whole)), where=covered > 0), 1.0))


def pair(a: Layout, b: Layout) -> Pairs:
    """Pair the rows of two tables by their keys."""
    row_in_a, row_in_b = ({key: row for row, key in enumerate(layout.keys)} for layout in (a, b))
    sequence_a, sequence_b = a.sequence.tolist(), b.sequence.tolist()
    both = [(row, row_in_b[a.keys[row]]) for row in sequence_a if a.keys[row] in row_in_b]
    rows_a, rows_b = np.array(both, np.int64).reshape(-1, 2).T
    missing = np.array([row for row in sequence_a if a.keys[row] not in row_in_b], np.int64)
    extra = np.array([row for row in sequence_b if b.keys[row] not in row_in_a], np.int64)
    pair_of_a, pair_of_b = inverse(rows_a, len(a.keys)), inverse(rows_b, len(b.keys))
    measured_a, measured_b = a.measured[rows_a], b.measured[rows_b]
    from_a, from_b = pair_of_a[measured_a], pair_of_b[measured_b]
    numbers = np.arange(len(rows_a))
    refers = (from_a == from_b) & (from_a >= 0) & (from_a != numbers)
    gradients = a.gradient[rows_a]
    backward = a.table.phase[rows_a] == Phase.BACKWARD
    # a gradient is the sum over all uses of a tensor: comparable if both runs measured the tensor in the same row
    forward_pair = np.where(backward, pair_of_a[a.forward[rows_a]], -1)
    both_measured = (measured_a == rows_a) & (measured_b == rows_b)
    partial = backward & (forward_pair >= 0) & ~both_measured[forward_pair]
    return Pairs(
        a=a,
        b=b,
        row_a=rows_a,
        row_b=rows_b,
        measured_a=measured_a,
        measured_b=measured_b,
        new_value=~refers,
        reference=np.where(refers, from_a, numbers),
        comparable=(measured_a >= 0) & (measured_b >= 0) & ~partial,
        gradient=np.where(gradients >= 0, pair_of_a[gradients], -1),
        missing=_without_partial(a, missing, pair_of_a, both_measured),
        extra=_without_partial(b, extra, pair_of_b, both_measured),
        reordered=_reordered(b, rows_a, rows_b, a.table.phase),
    )


def _without_partial(layout: Layout, lone: np.ndarray, pair_of: np.ndarray, both_measured: np.ndarray) -> np.ndarray:
    """Return the rows `lone` without gradients of tensors that only one of the two runs measured in this row."""
    forward = layout.forward[lone]
    number = np.where(forward >= 0, pair_of[forward], -1)
    partial = (number >= 0) & ~both_measured[number]
    return lone[~partial]


def inverse(rows: np.ndarray, length: int) -> np.ndarray:
    """Return the number of the pair of each row; -1 for rows without a pair."""
    pairs = np.full(length, -1, np.int64)
    pairs[rows] = np.arange(len(rows))
    return pairs


def _reordered(b: Layout, row_a: np.ndarray, row_b: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Return the pairs of the forward phase that come after a later one of the first run in the second run."""
    forward = np.flatnonzero(phases[row_a] == Phase.FORWARD)
    orders = b.table.order[row_b[forward]]
    return forward[orders < np.maximum.accumulate(orders)] if len(orders) else forward
