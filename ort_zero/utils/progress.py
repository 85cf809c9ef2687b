"""Show a progress bar of long work on stderr, if it is a terminal; the bar disappears at the end."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

hidden: list[bool] = []
"""Has an element while a command with ``--quiet`` runs: no bar is shown."""


class bar:
    """A progress bar that counts also where it is not shown; :meth:`update` may be called from any thread.

    Args:
        total: number of units; None if it is unknown before the first ``move()``.
        what: name of the work.
        unit: unit of the numbers; bytes are shown as KiB, MiB, ... with their speed, others with the time so far.
        shown: False on ranks and with options without a bar.
        delay: seconds of work before a bar appears.
        done: number of units that count as done at the begin.
    """

    def __init__(
        self, total: int | None, what: str, unit: str = "B", *, shown: bool = True, delay: float = 1, done: int = 0
    ):
        self.n: float = done
        """Number of units that are done."""
        self._lock = threading.Lock()
        self._progress: Any = None
        stream = sys.stderr  # of now: work may replace it in the meantime
        if not shown or hidden or stream is None or not stream.isatty():
            return
        # rich.style draws a number at its import (rich 13 to 15), which a training would miss
        state = random.getstate()
        from rich import progress
        from rich.console import Console

        random.setstate(state)
        columns: list[Any] = [progress.MofNCompleteColumn(), progress.BarColumn(), progress.TimeElapsedColumn()]
        if unit == "B":
            count, speed = progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()
            columns = [count, progress.BarColumn(), speed, progress.TimeRemainingColumn()]
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), *columns, console=Console(file=stream),
            transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._progress.add_task(what, total=total, completed=done)
        self._timer = threading.Timer(delay, self._start)
        self._timer.daemon = True
        if delay:
            self._timer.start()
        else:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._progress is not None:  # not closed in the meantime
                self._progress.start()

    def update(self, n: float = 1) -> None:
        """Count `n` more units as done."""
        with self._lock:
            self.n += n
            if self._progress is not None:
                self._progress.update(self._task, completed=self.n)

    def move(self, done: int, of: int, what: str = "") -> None:
        """Count `done` of `of` units as done, with the name `what` if it is not empty."""
        with self._lock:
            self.n = done
            if self._progress is not None:
                self._progress.update(self._task, completed=done, total=of, description=what or None)

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        with self._lock:
            shown, self._progress = self._progress, None
        if shown is not None:
            self._timer.cancel()
        if shown is not None and shown.live.is_started:
            shown.stop()

    def __enter__(self) -> bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
