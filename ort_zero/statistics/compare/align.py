"""Pair the rows of two runs' tables that belong to the same tensor.

The structure of a step rarely changes between steps, so one structure is used for many steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ort_zero.statistics.files import DESCRIPTION
from ort_zero.statistics.records import Phase, Table

Key = tuple[int, str, int, str, str, int]
"""Phase, module, occurrence, kind, slot, and a number from 0 that distinguishes otherwise equal keys."""
INPUT, OUTPUT, INSPECT, PARAMETER = range(4)
KIND_CODES = {"input": INPUT, "output": OUTPUT, "inspect": INSPECT, "parameter": PARAMETER}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The structure of the table of one step of one rank."""

    table: Table
    keys: list[Key]
    kind: np.ndarray
    measured: np.ndarray
    """For each row, the row with its statistics; -1 if there is none."""
    sequence: np.ndarray
    """All rows in the order of execution."""
    gradient: np.ndarray
    """For each row of the forward phase, the row of its gradient; -1 if there is none."""
    forward: np.ndarray
    """For each row of a gradient, its row of the forward phase; -1 if there is none."""


def layout_of(table: Table) -> Layout:
    """Find the structure of a table."""
    places = list(zip(table.phase.tolist(), table.order.tolist()))
    row_at = {place: row for row, place in enumerate(places)}
    measured = [
        row if source < 0 else row_at.get((phase, source), -1)
        for row, ((phase, _), source) in enumerate(zip(places, table.source.tolist()))
    ]
    gradient, forward = (
        [row_at.get((other, order), -1) if phase == this else -1 for phase, order in places]
        for this, other in ((Phase.FORWARD, Phase.BACKWARD), (Phase.BACKWARD, Phase.FORWARD))
    )
    order = np.where(table.phase == Phase.BACKWARD, -table.order, table.order)
    seen: Counter = Counter()
    keys: list[Key] = []
    for key in zip(table.phase.tolist(), table.module, table.occurrence.tolist(), table.kind, table.slot):
        keys.append((*key, seen[key]))
        seen[key] += 1
    return Layout(
        table=table,
        keys=keys,
        kind=np.array([KIND_CODES.get(kind, INSPECT) for kind in table.kind], dtype=np.int8),
        measured=np.array(measured, np.int64),
        sequence=np.lexsort((order, table.phase)),
        gradient=np.array(gradient, np.int64),
        forward=np.array(forward, np.int64),
    )


class CallTree:
    """The tree of the module calls in one step's table."""

    def __init__(self, layout: Layout):
        table = layout.table
        rows = np.flatnonzero(table.phase == Phase.FORWARD).tolist()
        self.about = {
            int(table.call[row]): (table.module[row], int(table.occurrence[row]), int(table.caller[row]))
            for row in rows
            if table.kind[row] != "inspect"
        }
        self.callers = {int(table.caller[row]) for row in rows}

    def name(self, call: int, fallback: str = "") -> tuple[str, int]:
        """Return the path of the module that a call runs, and which call of that module it is, counted from 1.

        For a call without records the path is `fallback`.
        """
        about = self.about.get(call)
        return about[:2] if about else (fallback, 1)

    def chain(self, call: int) -> list[int]:
        """Return a call and its enclosing calls, the root last."""
        calls: list[int] = []
        while call >= 0 and call not in calls:
            calls.append(call)
            call = self.about[call][2] if call in self.about else -1
        return calls


def same_layout(a: Table, b: Table) -> bool:
    """Return True if two tables of one run differ only in statistics."""
    columns = [(getattr(a, name), getattr(b, name)) for name in DESCRIPTION]
    return all(x is y or (np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y) for x, y in columns)


# --- pairs -----------------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One of the two runs in pairs."""

    which: str
    """``"first"`` or ``"second"``."""
    layout: Layout
    rows: np.ndarray
    """The row of each pair."""
    measured: np.ndarray
    """For each pair, the row with its statistics; -1 if there are none."""
    lone: np.ndarray
    """Rows without a partner in the other run, in order of execution."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of rows of two tables, in the first run's order of execution, and the rows without a partner."""

    a: Side
    b: Side
    new_value: np.ndarray
    """True where the pair's tensor is new in the step; False where both runs refer to the same earlier pair."""
    reference: np.ndarray
    """For each pair, the first pair with the same tensor: itself, or an earlier pair."""
    comparable: np.ndarray
    """False for gradients that are sums over different uses in the two runs, and for pairs without statistics."""
    gradient: np.ndarray
    """For each pair of the forward phase, the pair of its gradient; -1 if there is none."""
    reordered: np.ndarray
    """Pairs of the forward phase that come after a later one of the first run in the second run."""

    def __len__(self) -> int:
        return len(self.a.rows)

    @property
    def phase(self) -> np.ndarray:
        """Phase of each pair, see :class:`~ort_zero.statistics.records.Phase`."""
        return self.a.layout.table.phase[self.a.rows]

    @property
    def kind(self) -> np.ndarray:
        """Code of the kind of each pair, see :data:`KIND_CODES`."""
        return self.a.layout.kind[self.a.rows]


def pair(a: Layout, b: Layout) -> Pairs:
    """Pair the rows of two tables by their keys."""
    row_in_b = {key: row for row, key in enumerate(b.keys)}
    both = [(row, row_in_b[a.keys[row]]) for row in a.sequence.tolist() if a.keys[row] in row_in_b]
    rows_a, rows_b = np.array(both, np.int64).reshape(-1, 2).T
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
    forward = np.flatnonzero(a.table.phase[rows_a] == Phase.FORWARD)
    orders = b.table.order[rows_b[forward]]
    return Pairs(
        a=Side("first", a, rows_a, measured_a, _lone_rows(a, pair_of_a, both_measured)),
        b=Side("second", b, rows_b, measured_b, _lone_rows(b, pair_of_b, both_measured)),
        new_value=~refers,
        reference=np.where(refers, from_a, numbers),
        comparable=(measured_a >= 0) & (measured_b >= 0) & ~partial,
        gradient=np.where(gradients >= 0, pair_of_a[gradients], -1),
        reordered=forward[orders < np.maximum.accumulate(orders)],
    )


def _lone_rows(layout: Layout, pair_of: np.ndarray, both_measured: np.ndarray) -> np.ndarray:
    """Return the rows without a pair, but for gradients of tensors that only one run measured in this row."""
    lone = layout.sequence[pair_of[layout.sequence] < 0]
    forward = layout.forward[lone]
    number = np.where(forward >= 0, pair_of[forward], -1)
    return lone[(number < 0) | both_measured[number]]


def inverse(rows: np.ndarray, length: int) -> np.ndarray:
    """Return the number of the pair of each row; -1 for rows without a pair."""
    pairs = np.full(length, -1, np.int64)
    pairs[rows] = np.arange(len(rows))
    return pairs
