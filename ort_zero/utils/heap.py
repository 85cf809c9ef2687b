"""Gives memory back that the C library holds although nothing uses it.

PyTorch asks for aligned memory. Before glibc 2.38 the rest before and behind an aligned block goes to the lists for
small blocks and lands between large ones, so that a free block is too small for the next request of the same size: the
heap of a process that allocates and frees large blocks all the time grows although nothing is lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

GROWTH = 1.015
"""By which factor a process may grow before its free memory is given back."""
_USELESS = 1.002
"""A factor: where giving back has made the process no smaller than this, it had grown for another reason."""


class Heap:
    """Keeps the resident memory of a process that repeats its steps from growing.

    Args:
        resident: returns the resident memory of the process in any unit; it costs some microseconds.
        give_back: lets the C library return what is free; it costs some milliseconds.
    """

    def __init__(self, resident: Callable[[], int] | None = None, give_back: Callable[[], Any] | None = None):
        self._resident = resident or _resident_pages
        self._give_back = give_back or _malloc_trim()
        self._limit: float | None = None
        self._growth = GROWTH
        self.given_back = 0
        """How often memory was given back."""

    def check(self) -> None:
        """Give memory back if the process has grown; to be called once in a step, always at the same place."""
        if self._give_back is None:
            return
        before = self._resident()
        if self._limit is None:
            # what a step has needed is there again
            self._limit = before * self._growth
        elif before > self._limit:
            self._give_back()
            self.given_back += 1
            useless = before <= self._resident() * _USELESS
            # what has grown in truth will not shrink: wait until it has grown by more
            self._growth = min(2.0, self._growth**2) if useless else GROWTH
            self._limit = None


def _resident_pages() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        fields = file.read().split()
    return int(fields[1]) - int(fields[2])


def _malloc_trim() -> Callable[[], Any] | None:
    """Return what gives memory back; None on a system that cannot."""
    if not sys.platform.startswith("linux") or not os.path.exists("/proc/self/statm"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)
