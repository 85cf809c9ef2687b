"""Ranks that are threads of one process, for what only exchanges values."""

from __future__ import annotations

import threading
from typing import Any

from ort_zero.distributed.raise_on_all_ranks import RankGroup


class ThreadGroup(RankGroup):
    """One of several threads that exchange values as ranks do."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(30)
        found = list(self._values)
        self._barrier.wait(30)
        return found
