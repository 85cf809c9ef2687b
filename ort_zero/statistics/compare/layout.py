"""Find the structure of one step: the key of each row, the row with its statistics, and the row of its gradient.

The structure rarely changes between steps, so one structure is used for many steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.records import Phase, Table

Key = tuple[int, str, int, str, str, int]
"""Phase, module, occurrence, kind, slot, and a number from 0 that distinguishes otherwise equal keys."""
INPUT, OUTPUT, INSPECT, PARAMETER = range(4)
KIND_CODES = {"input": INPUT, "output": OUTPUT, "inspect": INSPECT, "parameter": PARAMETER}
_COLUMNS = ("phase", "order", "call", "caller", "occurrence", "source")
_LISTS = ("module", "kind", "slot", "shape", "dtype")


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
    return Layout(
        table=table,
        keys=_keys(table),
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
        """Return the module and the occurrence of a call; `fallback` and 1 for a call without records."""
        about = self.about.get(call)
        return about[:2] if about else (fallback, 1)

    def chain(self, call: int) -> list[int]:
        """Return a call and its enclosing calls, the root last."""
        calls: list[int] = []
        while call >= 0 and call not in calls:
            calls.append(call)
            call = self.about[call][2] if call in self.about else -1
        return calls

    def is_leaf(self, call: int) -> bool:
        """Return True if no module is called inside of a call."""
        return call not in self.callers


def same_layout(a: Table, b: Table) -> bool:
    """Return True if two tables of one run differ only in statistics."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in _COLUMNS) and all(
        getattr(a, name) is getattr(b, name) or getattr(a, name) == getattr(b, name) for name in _LISTS
    )


def _keys(table: Table) -> list[Key]:
    seen: Counter = Counter()
    keys = []
    for key in zip(table.phase.tolist(), table.module, table.occurrence.tolist(), table.kind, table.slot):
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys
