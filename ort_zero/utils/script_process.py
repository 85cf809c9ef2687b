"""Run a user's script in a separate process, and end it with all processes that it has started."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ort_zero.errors import ConfigError, OrtZeroError

GRACE_SECONDS = 60.0
"""Time in seconds in which a script may end by itself after its steps are done."""
_LAST_LINES = 20
"""Number of last lines that are shown of the output of a failed script."""
_WAITS = re.compile(r"\[ort_zero rank \d+\] \w+ waiting for ")
"""Matches a line of a rank that waits for a lock, perhaps for ever."""
_REPORT = "torch/distributed/elastic/"
"""Part of the first line of torchrun's report on a rank that failed, which hides what the rank printed."""
_WITHOUT_LAUNCHER = "No module named 'mpi4py'"
"""Where no launcher has set its variables, DeepSpeed asks MPI for ranks."""


class ScriptError(OrtZeroError):
    """The error for a script that failed or ended too early.

    Attributes:
        tail: the last lines that the script printed.
    """

    def __init__(self, message: str, tail: Sequence[str] = ()):
        super().__init__(message)
        self.tail = list(tail)


def command_line(
    script: Path, arguments: Sequence[str], launcher: str | None = None, python: str = sys.executable
) -> list[str]:
    """Return the command line that starts a script, behind the words of a launcher such as ``deepspeed --num_gpus 2``.

    A launcher's program is first looked for beside the interpreter `python`; another interpreter than this one must
    have it there, since a launcher on PATH would start the ranks with its own. What cannot be found is a ConfigError.
    """
    if not script.is_file():
        raise ConfigError(f"the script {script} does not exist")
    if shutil.which(python) is None:
        raise ConfigError(f"--python: there is no program {python}")
    if launcher is None:
        return [python, str(script), *arguments]
    try:
        words = shlex.split(launcher)
    except ValueError as error:  # a quote is not closed
        raise ConfigError(f"--launcher {launcher!r}: {error}") from None
    if not words:
        raise ConfigError("--launcher is empty")
    beside = Path(python).parent / words[0]  # not on PATH where Python is called by its path
    found = str(beside) if beside.is_file() else shutil.which(words[0]) if python == sys.executable else None
    if found is None:
        raise ConfigError(f"--launcher: there is no program {words[0]!r} beside {python}")
    return [found, *words[1:], str(script), *arguments]


class RequestedRun(NamedTuple):
    """The result of a script that was asked to measure something."""

    status: int
    """Exit status; also 0 if the script was ended after its work."""
    reports: list[Any]
    """Reports of the ranks on this machine, rank 0 first."""
    tail: list[str]
    """The last lines that the script printed."""


def run_with_request(
    command: Sequence[str],
    variable: str,
    request: Mapping[str, Any],
    is_done: Callable[[list[Any]], bool] = bool,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> RequestedRun:
    """Run a command with a request in a file, until it ends or its ranks have written their reports, files of JSON.

    No process of the command outlives the call. A script that needs a launcher is a ConfigError.

    Args:
        command: the command line of the script.
        variable: name of the environment variable that names the request file.
        request: what the file asks for; ``"report"`` is added, the path to which rank n adds ``.n``.
        is_done: returns whether the reports so far are complete, by default whether there is one; asked twice a second.
            A script that continues after that is ended after :data:`GRACE_SECONDS`. What it raises ends the script.
        environment: more variables for the script.
        log: file for what the script prints; None keeps the last lines alone.
    """
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps({**request, "report": str(folder / "report")}))
        # nothing else differs from a start by the user: another PATH would make DeepSpeed compile its operators again
        variables = {**os.environ, **(environment or {}), variable: str(folder / "request.json")}
        variables["PYTHONUNBUFFERED"] = "1"
        log = log or folder / "log"
        with open(log, "wb") as output, _ended_by_sigterm():
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                with open(log, encoding="utf-8", errors="replace") as printed:
                    status = _wait(process, lambda: is_done(_reports_in(folder)), printed)
            finally:
                _end(process)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        report = next((number for number, line in enumerate(lines) if _REPORT in line and line[0] == "E"), len(lines))
        tail = lines[:report][-_LAST_LINES:]
        if status and tail and _WITHOUT_LAUNCHER in tail[-1]:
            raise ConfigError(
                "DeepSpeed found no launcher's variables in the script, and no mpi4py in their place: "
                "--launcher 'deepspeed --num_gpus 2', with the launcher and the ranks of your training"
            )
        return RequestedRun(status, _reports_in(folder), tail)


def _reports_in(folder: Path) -> list[Any]:
    """Return the reports that the ranks have written so far; a rank replaces its file at once."""
    ranks = sorted(int(file.suffix[1:]) for file in folder.glob("report.*") if file.suffix[1:].isdigit())
    return [json.loads((folder / f"report.{rank}").read_text(encoding="utf-8")) for rank in ranks]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise SystemExit in the block, as SIGINT raises KeyboardInterrupt: the script is to end, too.

    Does nothing outside the main thread, and to an ignored signal.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: subprocess.Popen, is_done: Callable[[], bool], printed: TextIO) -> int:
    """Wait for a script, and return its exit status; 0 once it outlives its work by :data:`GRACE_SECONDS`.

    Prints the lines of the script in which a rank says what it waits for.
    """
    until = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            print(*filter(_WAITS.match, printed), sep="", end="", file=sys.stderr, flush=True)
            if is_done() and until is None:
                until = now + GRACE_SECONDS
            if until is not None and now > until:
                return 0


def _end(process: subprocess.Popen) -> None:
    """End a process and all processes that it has started.

    SIGINT comes first: a script that is killed while it compiles leaves a lock for which the next script waits.
    """
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)  # includes the ranks of a launcher
        except (ProcessLookupError, PermissionError):
            return
        if process.poll() is not None:
            continue
        try:
            process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C must not keep the process alive
            continue
