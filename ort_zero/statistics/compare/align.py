"""Pairs the records of two runs: which row of one table is which row of the other."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.layout import Layout
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.records import Phase


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Rows that both tables have, in the first run's order of execution, and rows that one lacks."""

    a: Layout
    b: Layout
    row_a: np.ndarray
    row_b: np.ndarray
    measured_a: np.ndarray
    """For each pair the row of the first table that has the statistics, -1 without."""
    measured_b: np.ndarray
    own: np.ndarray
    """True where the value came into being here; False where both runs refer to one and the same earlier pair."""
    reference: np.ndarray
    """The pair that stands for each pair's value: itself, or an earlier one."""
    comparable: np.ndarray
    """False for gradients that are sums over different uses in the two runs, and where statistics are lacking."""
    gradient: np.ndarray
    """For each pair of the forward phase the pair of its gradient, -1 without."""
    missing: np.ndarray
    """Rows of the first table that the second one lacks, in order of execution."""
    extra: np.ndarray
    """Rows of the second table that the first one lacks."""
    reordered: np.ndarray
    """Pairs of the forward phase that come in another order."""

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
    """The numbers of one step in two runs, with what says which row of one is which row of the other.

    The tables have the layouts of `pairs`, but may be of a later step than the tables in those.
    """

    pairs: Pairs
    a: Table
    b: Table

    def larger_norm(self) -> np.ndarray:
        """Return for each pair the larger of the two l2 norms of what was measured."""
        return np.maximum(self.a.l2[self.pairs.measured_a], self.b.l2[self.pairs.measured_b])

    def unsampled(self) -> np.ndarray:
        """Return how many times larger the norm of a whole tensor is than that of the sample that was measured."""
        covered = self.a.elements[self.pairs.measured_a]
        shapes = [self.a.shape[row] for row in self.pairs.row_a.tolist()]
        whole = np.fromiter((math.prod(shape) for shape in shapes), float, len(shapes))
        return np.sqrt(np.maximum(np.divide(whole, covered, out=np.ones(len(whole)), where=covered > 0), 1.0))


def pair(a: Layout, b: Layout) -> Pairs:
    """Return what two tables have in common."""
    in_b = {key: row for row, key in enumerate(b.keys)}
    row_a, row_b, missing = [], [], []
    for row in a.sequence.tolist():
        other = in_b.get(a.keys[row], -1)
        if other < 0:
            missing.append(row)
        else:
            row_a.append(row)
            row_b.append(other)
    rows_a, rows_b = np.array(row_a, np.int64), np.array(row_b, np.int64)
    in_a = np.zeros(len(b.keys), bool)
    in_a[rows_b] = True
    extra = b.sequence[~in_a[b.sequence]]
    own, reference = _references(a, b, rows_a, rows_b)
    measured_a, measured_b = a.measured[rows_a], b.measured[rows_b]
    pair_of_a = inverse(rows_a, len(a.keys))
    gradients = a.gradient[rows_a]
    backward = a.table.phase[rows_a] == Phase.BACKWARD
    # a gradient is the sum over all uses of a tensor: comparable where the same uses belong to the same row
    forward_pair = np.where(backward, pair_of_a[a.forward[rows_a]], -1)
    both_own = (a.measured[rows_a] == rows_a) & (b.measured[rows_b] == rows_b)
    partial = backward & (forward_pair >= 0) & ~both_own[forward_pair]
    return Pairs(
        a=a,
        b=b,
        row_a=rows_a,
        row_b=rows_b,
        measured_a=measured_a,
        measured_b=measured_b,
        own=own,
        reference=reference,
        comparable=(measured_a >= 0) & (measured_b >= 0) & ~partial,
        gradient=np.where(gradients >= 0, pair_of_a[gradients], -1),
        missing=_without_partial(a, np.array(missing, np.int64), pair_of_a, both_own),
        extra=_without_partial(b, extra, inverse(rows_b, len(b.keys)), both_own),
        reordered=_reordered(b, rows_a, rows_b, a.table.phase),
    )


def _without_partial(layout: Layout, lone: np.ndarray, pair_of: np.ndarray, both_own: np.ndarray) -> np.ndarray:
    """Return rows of one table alone, but for gradients at tensors that one run measures and the other refers to."""
    forward = layout.forward[lone]
    number = np.where(forward >= 0, pair_of[forward], -1)
    partial = (number >= 0) & ~both_own[number]
    return lone[~partial]


def inverse(rows: np.ndarray, length: int) -> np.ndarray:
    """Return the pair of each row, -1 without."""
    found = np.full(length, -1, np.int64)
    found[rows] = np.arange(len(rows))
    return found


def _references(a: Layout, b: Layout, row_a: np.ndarray, row_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pair_of_a, pair_of_b = inverse(row_a, len(a.keys)), inverse(row_b, len(b.keys))
    numbers = np.arange(len(row_a))
    from_a, from_b = pair_of_a[a.measured[row_a]], pair_of_b[b.measured[row_b]]
    refers = (from_a == from_b) & (from_a >= 0) & (from_a != numbers)
    return ~refers, np.where(refers, from_a, numbers)


def _reordered(b: Layout, row_a: np.ndarray, row_b: np.ndarray, phases: np.ndarray) -> np.ndarray:
    forward = np.flatnonzero(phases[row_a] == Phase.FORWARD)
    orders = b.table.order[row_b[forward]]
    if (np.diff(orders) > 0).all():
        return np.zeros(0, np.int64)
    in_order = set(_longest_increasing(orders.tolist()))
    return forward[[index for index in range(len(forward)) if index not in in_order]]


def _longest_increasing(values: Sequence[int]) -> list[int]:
    """Return the indices of a longest increasing subsequence (patience sorting: Fredman 1975)."""
    tails: list[int] = []
    ends: list[int] = []
    before = [-1] * len(values)
    for index, value in enumerate(values):
        pile = bisect_left(tails, value)
        before[index] = ends[pile - 1] if pile else -1
        tails[pile : pile + 1] = [value]
        ends[pile : pile + 1] = [index]
    chain = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(index)
        index = before[index]
    return chain[::-1]
