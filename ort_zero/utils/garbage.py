"""Python's cyclic garbage collector, out of the way where very many small objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let the collector of this process rest in the block: it would walk over all objects again and again.

    Only memory in reference cycles waits until the end. Nothing changes where the collector is off already.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
