"""The bar of tqdm; a module of its own, for most runs show none and need not import tqdm."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm


class TerminalBar(tqdm):
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
