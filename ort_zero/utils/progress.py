"""The progress bar of long work: on stderr, only on a terminal, gone when the work is done."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm


class Bar(tqdm):
    """A bar of tqdm that counts right when several threads update it."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._counting = threading.Lock()
        super().__init__(*args, **kwargs)

    def update(self, n: float = 1) -> bool | None:
        """Count `n` more units as done."""
        with self._counting:
            return super().update(n)

    def move(self, done: int, of: int, what: str = "") -> None:
        """Show that `done` units of `of` are done, named `what` if that is given; take the bar away when all are."""
        if self.disable:
            return
        self.total = of
        self.update(done - self.n)
        if what:
            self.set_description_str(what)
        if done >= of:
            self.close()


def bar(total: int | None, what: str, unit: str = "B", *, shown: bool = True, delay: float = 1) -> Bar:
    """Return a bar that counts `total` units; ``update(n)`` from any thread, ``close()`` at the end.

    Args:
        total: None if it is not known before the first :meth:`Bar.move`.
        what: is being done.
        unit: unit of the numbers; bytes are shown as KiB, MiB, ...
        shown: False on ranks and with options that want no bar.
        delay: seconds of work before a bar appears.
    """
    scaled = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    hidden = not shown or not sys.stderr.isatty()
    return Bar(total=total, desc=what, unit=unit, delay=delay, leave=False, disable=hidden, **scaled)
