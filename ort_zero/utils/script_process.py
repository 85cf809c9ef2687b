"""Runs a user's script in a process of its own, and ends it with all that it has started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ort_zero.errors import ConfigError

R = TypeVar("R")
GRACE_SECONDS = 60.0
"""Seconds that a script has to end by itself when its steps are done."""


_LAST_LINES = 20
"""Number of lines that are shown of the output of a script that failed."""


class ScriptFailure(Exception):
    """A script did not get as far as it had to.

    Attributes:
        tail: the last lines that it printed.
    """

    def __init__(self, message: str, tail: Sequence[str] = ()):
        super().__init__(message)
        self.tail = list(tail)


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a file that a script has printed into."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]


def split_launcher(launcher: str) -> tuple[str, ...]:
    """Return the arguments of a launcher's command line.

    Raises:
        ConfigError: a quote is not closed, there are none, or there is no such program.
    """
    try:
        arguments = tuple(shlex.split(launcher))
    except ValueError as error:
        raise ConfigError(f"--launcher {launcher!r}: {error}") from None
    if not arguments:
        raise ConfigError("--launcher is empty")
    return arguments


def require_script(script: Path, launcher: Sequence[str] = ()) -> None:
    """Refuse what cannot be started.

    Raises:
        ConfigError: the script, or the launcher's program, does not exist.
    """
    if not script.is_file():
        raise ConfigError(f"the script {script} does not exist")
    if launcher and _found(launcher[0]) is None:
        raise ConfigError(f"--launcher: there is no program {launcher[0]!r}")


def command_line(script: Path, arguments: Sequence[str], launcher: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts a script, as a list of arguments."""
    before = [str(_found(launcher[0])), *launcher[1:]] if launcher else [sys.executable]
    return [*before, str(script), *arguments]


def _found(program: str) -> str | None:
    """Return the path of a launcher, first of those installed beside this Python."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.is_file() else shutil.which(program)


def run_script(command: Sequence[str], log: Path, environment: Mapping[str, str], is_done: Callable[[], bool]) -> int:
    """Run a command until it ends or has done its work; return its status, 0 if it was ended after its work.

    No process of it outlives the call.

    Args:
        command: starts the script.
        log: file for the output.
        environment: variables that the script has besides those of this process.
        is_done: asked twice a second; a script that goes on after that is ended after :data:`GRACE_SECONDS`.
    """
    # nothing else differs from the user's own start: another PATH would make DeepSpeed compile its operators again
    with open(log, "wb") as output, _Signals() as signals:
        # raised in here, an interrupt would leave a script that nobody knows of
        process = subprocess.Popen(
            command, env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            signals.deliver()
            return _wait(process, is_done)
        finally:
            _end(process)


@dataclass(frozen=True, slots=True)
class RequestedRun(Generic[R]):
    """What came of a script that was asked to measure something."""

    status: int
    """Exit status; 0 too if the script was ended after its work."""
    reports: list[R]
    """Of the ranks on this machine, rank 0 first."""
    tail: list[str]
    """The last lines that the script printed."""


def run_with_request(
    command: Sequence[str],
    variable: str,
    write_request: Callable[[Path, str], None],
    read_reports: Callable[[Path], list[R]],
    is_done: Callable[[list[R]], bool],
) -> RequestedRun[R]:
    """Run a command with a request in a file that the environment names, until its ranks have reported.

    Args:
        command: starts the script.
        variable: name of the variable of the environment.
        write_request: writes the file, given its path and that of the reports, to which rank n appends ``.n``.
        read_reports: returns what the ranks have written so far.
        is_done: returns whether these reports are all that was asked for; asked twice a second.
    """
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as name:
        folder = Path(name)
        request, report, log = folder / "request.json", folder / "report", folder / "log"
        write_request(request, str(report))
        status = run_script(command, log, {variable: str(request)}, lambda: is_done(read_reports(report)))
        return RequestedRun(status, read_reports(report), last_lines(log))


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


def _wait(process: subprocess.Popen, is_done: Callable[[], bool]) -> int:
    """Return the status; a script that holds on after its steps are done is not waited for."""
    until = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if is_done() and until is None:
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
