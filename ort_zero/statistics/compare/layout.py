"""Find the structure of one step: the key of each row, the row with its statistics, and the row of its gradient.

The structure rarely changes between steps, so one structure is used for many steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.records import Phase

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
    """Return True if two tables of one run differ only in statistics."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in _COLUMNS) and all(
        getattr(a, name) is getattr(b, name) or getattr(a, name) == getattr(b, name) for name in _LISTS
    )


def _look_up(at: np.ndarray, orders: np.ndarray) -> np.ndarray:
    rows = np.full(len(orders), -1, np.int64)
    in_range = orders < len(at)
    rows[in_range] = at[orders[in_range]]
    return rows


def _keys(table: Table) -> list[Key]:
    plain = list(zip(table.phase.tolist(), table.module, table.occurrence.tolist(), table.kind, table.slot))
    seen: Counter = Counter()
    keys = []
    for key in plain:
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys


def check_references(table: Table, name: str) -> None:
    """Raise if a row refers to a row that the table does not have."""
    rows = np.flatnonzero((table.phase == Phase.FORWARD) & (table.source >= 0))
    orders = table.order[table.phase == Phase.FORWARD]
    if not np.isin(table.source[rows], orders).all():
        raise StatisticsError(f"{name}: step {table.step} refers to records that it does not hold; collect it again")
