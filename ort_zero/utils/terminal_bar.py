"""Show tqdm's progress bar; in a separate module, since runs without a bar should not import tqdm."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm


class TerminalBar(tqdm):
    """A bar of tqdm that counts correctly when several threads update it."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._counting = threading.Lock()
        super().__init__(*args, **kwargs)

    def update(self, n: float = 1) -> bool | None:
        """Count `n` more units as done."""
        with self._counting:
            return super().update(n)

    def move(self, done: int, of: int, what: str = "") -> None:
        """Show `done` of `of` units as done, with the name `what` if it is not empty; close the bar when all are."""
        if self.disable:
            return
        self.total = of
        self.update(done - self.n)
        if what:
            self.set_description_str(what)
        if done >= of:
            self.close()
