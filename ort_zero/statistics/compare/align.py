"""Pairs the records of two runs: which row of one table is which row of the other, and what each was computed from.

The structure of a step hardly ever changes from one step to the next, so that it is made once and used again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.records import Phase

Key = tuple[int, str, int, str, str, int]
"""Phase, module, occurrence, kind, slot; the last number tells equal ones apart."""
INPUT, OUTPUT, INSPECT, PARAMETER = range(4)
KIND_CODES = {"input": INPUT, "output": OUTPUT, "inspect": INSPECT, "parameter": PARAMETER}
_COLUMNS = ("phase", "order", "call", "caller", "occurrence", "source")
_LISTS = ("module", "kind", "slot", "shape", "dtype")


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One table's structure."""

    table: Table
    keys: list[Key]
    kind: np.ndarray
    measured: np.ndarray
    """The row that has each row's statistics; -1 if there is none."""
    sequence: np.ndarray
    """All rows in the order in which the values came into being."""
    gradient: np.ndarray
    """For each row of the forward phase the row of its gradient, -1 without."""
    forward: np.ndarray
    """For each row of a gradient its row of the forward phase, -1 without."""


def layout_of(table: Table) -> Layout:
    """Return the structure of a table."""
    row_of = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        orders = table.order[table.phase == phase]
        at = np.full(int(orders.max(initial=-1)) + 1, -1, np.int64)
        at[orders] = np.flatnonzero(table.phase == phase)
        row_of[phase] = at
    measured = np.arange(len(table.phase), dtype=np.int64)
    gradient, forward = np.full(len(measured), -1, np.int64), np.full(len(measured), -1, np.int64)
    for phase, at in row_of.items():
        refers = np.flatnonzero((table.phase == phase) & (table.source >= 0))
        measured[refers] = _look_up(at, table.source[refers])
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    gradient[rows] = _look_up(row_of[Phase.BACKWARD], table.order[rows])
    rows = np.flatnonzero(table.phase == Phase.BACKWARD)
    forward[rows] = _look_up(row_of[Phase.FORWARD], table.order[rows])
    order = np.where(table.phase == Phase.BACKWARD, -table.order, table.order)
    return Layout(
        table=table,
        keys=_keys(table),
        kind=np.array([KIND_CODES.get(kind, INSPECT) for kind in table.kind], dtype=np.int8),
        measured=measured,
        sequence=np.lexsort((order, table.phase)),
        gradient=gradient,
        forward=forward,
    )


def same_layout(a: Table, b: Table) -> bool:
    """Return True if two tables of one run differ in numbers alone."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in _COLUMNS) and all(
        getattr(a, name) is getattr(b, name) or getattr(a, name) == getattr(b, name) for name in _LISTS
    )


def _look_up(at: np.ndarray, orders: np.ndarray) -> np.ndarray:
    found = np.full(len(orders), -1, np.int64)
    known = orders < len(at)
    found[known] = at[orders[known]]
    return found


def _keys(table: Table) -> list[Key]:
    plain = list(zip(table.phase.tolist(), table.module, table.occurrence.tolist(), table.kind, table.slot))
    seen: Counter = Counter()
    keys = []
    for key in plain:
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Rows that both tables have, in the first run's order of execution, and rows that one lacks."""

    a: Layout
    b: Layout
    row_a: np.ndarray
    row_b: np.ndarray
    measured_a: np.ndarray
    """Rows with the statistics, -1 without."""
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
        """Phase of each pair."""
        return self.a.table.phase[self.row_a]


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
    kept = set(_longest_increasing(orders.tolist()))
    return forward[[place for place in range(len(forward)) if place not in kept]]


def _longest_increasing(values: Sequence[int]) -> list[int]:
    """Return the places of a longest increasing subsequence (patience sorting: Fredman 1975)."""
    tails: list[int] = []
    places: list[int] = []
    before = [-1] * len(values)
    for place, value in enumerate(values):
        pile = bisect_left(tails, value)
        before[place] = places[pile - 1] if pile else -1
        tails[pile : pile + 1] = [value]
        places[pile : pile + 1] = [place]
    chain = []
    place = places[-1] if places else -1
    while place >= 0:
        chain.append(place)
        place = before[place]
    return chain[::-1]


def check_references(table: Table, name: str) -> None:
    """Raise if rows refer to rows that are not there."""
    rows = np.flatnonzero((table.phase == Phase.FORWARD) & (table.source >= 0))
    orders = table.order[table.phase == Phase.FORWARD]
    if not np.isin(table.source[rows], orders).all():
        raise StatisticsError(f"{name}: step {table.step} refers to records that it does not hold; collect it again")
