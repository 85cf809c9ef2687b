"""Runs a user's script in a process of its own, and ends it with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.recompute.trial import DONE, read_results

GRACE_SECONDS = 60.0
"""Seconds that a script has to end by itself when its steps are done."""


def run_script(command: Sequence[str], request: Path, report: Path, log: Path) -> int:
    """Run a command until it ends or has reported; return its status, 0 if it was ended after its report.

    No process of it outlives the call.

    Args:
        command: starts the script.
        request: file of the :class:`~ort_zero.recompute.trial.TrialRequest`.
        report: file of the report, see :func:`~ort_zero.recompute.trial.read_results`.
        log: file for the output.
    """
    # nothing else differs from the user's own start: another PATH would make DeepSpeed compile its operators again
    environment = {**os.environ, env.MEMORY_TRIAL: str(request), "PYTHONUNBUFFERED": "1"}
    with open(log, "wb") as output, _Signals() as signals:
        # raised in here, an interrupt would leave a script that nobody knows of
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            signals.deliver()
            return _wait(process, report)
        finally:
            _end(process)


class _Signals:
    """Lets SIGINT and SIGTERM unwind the stack in a block, from the call of :meth:`deliver` on; one before that waits.

    The script has a session of its own, and would live on. Does nothing outside the main thread, which alone may set
    handlers; a signal that is ignored stays so.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._delivers = False
        self._pending: int | None = None

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *unused: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Raise what has come, and from now on at once.

        Raises:
            KeyboardInterrupt: it was SIGINT.
            SystemExit: it was SIGTERM.
        """
        self._delivers = True
        if self._pending is not None:
            self._raise(self._pending)

    def _handle(self, number: int, frame: Any) -> None:
        self._pending = number
        if self._delivers:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _wait(process: subprocess.Popen, report: Path) -> int:
    """Return the status; a script that holds on after its steps are done is not waited for."""
    until = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if until is None and any(o.state == DONE for o in read_results(report)):
                until = now + GRACE_SECONDS
            if until is not None and now > until:
                return 0


def _end(process: subprocess.Popen) -> None:
    """End a process and all that it started.

    An interrupt comes first: a script that is killed while it compiles leaves a lock that the next one waits for.
    """
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)  # a launcher's ranks as well
        except (ProcessLookupError, PermissionError):
            return
        if process.poll() is not None:
            continue
        try:
            process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # an impatient user does not want it to live on either
            continue
