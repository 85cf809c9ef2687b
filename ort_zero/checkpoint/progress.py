"""The progress bar of long work: on stderr, only on a terminal, only after a second, only on one rank."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm


class _Bar(tqdm):
    """Counts right from several threads."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._counting = threading.Lock()
        super().__init__(*args, **kwargs)

    def update(self, n: float = 1) -> bool | None:
        """Count `n` more."""
        with self._counting:
            return super().update(n)


def bar(total: int, what: str, shown: bool = True) -> tqdm:
    """Return a bar that counts `total` bytes; ``update(n)`` from any thread, ``close()`` at the end."""
    return _Bar(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=1,
        leave=False,
        disable=not shown or not sys.stderr.isatty(),
    )
