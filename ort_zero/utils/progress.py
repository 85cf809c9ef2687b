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
        self._total, self._what, self._unit = total, what, unit
        # the stream of now: work may replace sys.stderr in the meantime
        self._stream: Any = sys.stderr if shown and not hidden and sys.stderr is not None else None
        self._lock = threading.Lock()
        self._progress: Any = None
        self._task: Any = None
        self._timer: threading.Timer | None = None
        if self._stream is None or not self._stream.isatty():
            self._stream = None
            return
        # rich.style draws a number at its import (rich 13 to 15), which a training would miss
        state = random.getstate()
        import rich.progress  # noqa: F401

        random.setstate(state)
        if delay:
            self._timer = threading.Timer(delay, self._start)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._start()

    def _start(self) -> None:
        from rich import progress
        from rich.console import Console

        count: Any = progress.MofNCompleteColumn()
        times: list[Any] = [progress.TimeElapsedColumn()]
        if self._unit == "B":
            count = progress.DownloadColumn(binary_units=True)
            times = [progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
        columns = [progress.TextColumn("{task.description}", markup=False), count, progress.BarColumn(), *times]
        with self._lock:
            if self._stream is None:
                return  # closed in the meantime
            self._progress = progress.Progress(
                *columns, console=Console(file=self._stream), transient=True, redirect_stdout=False,
                redirect_stderr=False,
            )  # fmt: skip
            self._task = self._progress.add_task(self._what, total=self._total, completed=self.n)
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
            self.n, self._total, self._what = done, of, what or self._what
            if self._progress is not None:
                self._progress.update(self._task, completed=done, total=of, description=self._what)

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        with self._lock:
            shown, self._progress, self._stream = self._progress, None, None
        if self._timer is not None:
            self._timer.cancel()
        if shown is not None:
            shown.stop()

    def __enter__(self) -> bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
