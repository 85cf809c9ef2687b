"""Keep Python's random numbers as they are where a library draws some."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the module ``random`` its state back at the end: a training's draws must not depend on what we import.

    ``rich.style`` draws a number when it is imported (rich 13 to 15).
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
