"""The progress bar of long work: on stderr, only on a terminal, gone when the work is done."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """A progress bar that is not shown; has what callers use of the one that is."""

    n: float = 0

    def update(self, n: float = 1) -> bool | None:
        """Count `n` more units as done."""
        self.n += n
        return None

    def move(self, done: int, of: int, what: str = "") -> None:
        """Take no notice."""

    def close(self) -> None:
        """Do nothing: there is nothing to take away."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def bar(total: int | None, what: str, unit: str = "B", *, shown: bool = True, delay: float = 1) -> Any:
    """Return a bar that counts `total` units; ``update(n)`` from any thread, ``close()`` at the end.

    Args:
        total: None if it is not known before the first ``move()``.
        what: is being done.
        unit: unit of the numbers; bytes are shown as KiB, MiB, ...
        shown: False on ranks and with options that want no bar.
        delay: seconds of work before a bar appears.
    """
    if not shown or not sys.stderr.isatty():
        return Bar()
    from ort_zero.utils.terminal_bar import TerminalBar

    scaled = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return TerminalBar(total=total, desc=what, unit=unit, delay=delay, leave=False, **scaled)
