"""Navigate the tree of a step's module calls."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.layout import Layout
from ort_zero.statistics.records import Phase


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
