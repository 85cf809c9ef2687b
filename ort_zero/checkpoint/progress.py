"""The progress bar of long work: on stderr, only on a terminal, only after a second, only on one rank."""

from __future__ import annotations

import sys

from tqdm import tqdm


def bar(total: int, what: str, shown: bool = True) -> tqdm:
    """Return a bar that counts `total` bytes; ``update(n)`` from any thread, ``close()`` at the end."""
    return tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=1,
        leave=False,
        disable=not shown or not sys.stderr.isatty(),
    )
