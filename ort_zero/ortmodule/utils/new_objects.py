"""Tells which objects were made since a moment, by the generations of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


class NewObjects:
    """Knows which objects were made while :meth:`noted` runs; for objects that the garbage collector tracks."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._noting = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note from here on what is made in the block; a block within another one belongs to that."""
        if self._noting:
            yield
            return
        if gc.get_freeze_count():  # the program has frozen objects of its own, and these could not be told apart
            yield
            return
        gc.freeze()
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
            gc.unfreeze()

    def __contains__(self, value: Any) -> bool:
        """Return whether an object was made in the block; True for all where that cannot be known."""
        if not self._noting:
            return True
        known = self._known.get(id(value))
        if known is None:
            made = (other is value for generation in range(3) for other in gc.get_objects(generation))
            known = self._known[id(value)] = any(made)
        return known
