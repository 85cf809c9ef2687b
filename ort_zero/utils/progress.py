"""Show a progress bar of long work on stderr, if it is a terminal; the bar disappears at the end."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

hidden: list[bool] = []
"""Has an element while a command with ``--quiet`` runs: no bar is shown."""


class Bar:
    """A progress bar that is not shown, with the methods that callers use of the visible bar."""

    n: float = 0

    def update(self, n: float = 1) -> bool | None:
        """Count `n` more units as done."""
        self.n += n
        return None

    def move(self, done: int, of: int, what: str = "") -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def bar(total: int | None, what: str, unit: str = "B", *, shown: bool = True, delay: float = 1) -> Any:
    """Return a bar that counts `total` units; ``update(n)`` from any thread, ``close()`` at the end.

    Args:
        total: number of units; None if it is unknown before the first ``move()``.
        what: name of the work.
        unit: unit of the numbers; bytes are shown as KiB, MiB, ...
        shown: False on ranks and with options without a bar.
        delay: seconds of work before a bar appears.
    """
    if not shown or hidden or not sys.stderr.isatty():
        return Bar()
    from ort_zero.utils.terminal_bar import TerminalBar

    scaled = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return TerminalBar(total=total, desc=what, unit=unit, delay=delay, leave=False, **scaled)


class Steps:
    """The progress of work in a few long steps."""

    def __init__(self, what: str):
        self.text = what
        self.done = 0
        self._what = what

    def begin(self, step: str) -> None:
        """Name the step that runs now."""
        self.text = f"{self._what}: {step}"

    def end(self) -> None:
        """Count a step as done."""
        self.done += 1


@contextlib.contextmanager
def steps_bar(what: str, steps: int, *, done: int = 0, shown: bool = True, delay: float = 2) -> Iterator[Steps]:
    """Show a bar while the block works in a few steps, each of which may be long; its clock runs all the time.

    Args:
        what: name of the work.
        steps: number of steps.
        done: number of steps that count as done at the begin.
        shown: False on ranks without a bar.
        delay: seconds of work before a bar appears.
    """
    progress = Steps(what)
    progress.done = done
    if not shown or hidden or sys.stderr is None or not sys.stderr.isatty():
        yield progress
        return
    over = threading.Event()
    # the current stream: an export replaces sys.stderr in the meantime
    thread = threading.Thread(target=_show, args=(progress, steps, delay, sys.stderr, over), daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join()


def _show(progress: Steps, steps: int, delay: float, stream: Any, over: threading.Event) -> None:
    """Draw a bar twice a second until the work is over, and remove it."""
    if over.wait(delay):
        return
    from ort_zero.utils.terminal_bar import TerminalBar

    form = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}"
    done = min(progress.done, steps)
    with TerminalBar(
        total=steps, initial=done, desc=progress.text, file=stream, leave=False, bar_format=form
    ) as bar_shown:
        bar_shown.start_t -= delay
        while not over.wait(0.5):
            bar_shown.n = min(progress.done, steps)
            bar_shown.set_description_str(progress.text)
