"""Plans with a user's own script: runs it once for each plan that is looked at, and holds what it measures together.

Imports neither torch nor onnxruntime: all that needs them happens in the script's process, see
:mod:`ort_zero.recompute.planning_session`.
"""

from __future__ import annotations

import json
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ort_zero import config as section_config
from ort_zero import env
from ort_zero.config import MemoryConfig
from ort_zero.errors import ConfigError, MemoryPlanError, RankError
from ort_zero.recompute.options import is_wrong, parse_budget, read_json
from ort_zero.recompute.plan_table import against
from ort_zero.recompute.planning_session import DONE, FAILED, Order, Outcome, read_outcomes
from ort_zero.utils.atomic_write import write_text

_TAIL = 20
"""Lines of a script that failed."""
_GRACE = 60.0
"""Seconds that a script gets to end by itself when its steps are done."""
WITHOUT, BUDGET, POINT = "without recomputation", "budget", "point"


class ScriptError(MemoryPlanError):
    """The script did not get as far as it had to.

    Attributes:
        tail: the last lines that it printed.
    """

    def __init__(self, message: str, tail: Sequence[str] = ()):
        super().__init__(message)
        self.tail = list(tail)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned; see :func:`prepare`."""

    config: Path
    script: Path
    arguments: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    """``"6GiB"``, ``"65%"``; none takes the section's, else a share of the memory that is free."""
    level: int | None = None
    """None takes the section's."""
    steps: int = 3
    """Of each run; 0 only predicts."""
    points: int = 0
    """Of the predicted path, to be measured besides."""
    launcher: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The words that start the script."""
        before = [str(_found(self.launcher[0])), *self.launcher[1:]] if self.launcher else [sys.executable]
        return [*before, str(self.script), *self.arguments]

    def memory(self, recompute: str | list[str], budget: str | None = None) -> dict[str, Any]:
        """Return a ``memory`` part of the section."""
        made: dict[str, Any] = {"recompute": recompute}
        if budget is not None:
            made["budget"] = budget
        if self.level is not None and recompute != "off":
            made["level"] = self.level
        return made


def prepare(task: Task) -> Task:
    """Return `task` with what the section says where it says nothing itself.

    Raises:
        ConfigError: a file or a value is wrong.
    """
    for budget in task.budgets:
        parse_budget(budget, "--budget")
    if not task.script.is_file():
        raise ConfigError(f"the script {task.script} does not exist")
    section = read_section(task.config)
    if task.launcher and _found(task.launcher[0]) is None:
        raise ConfigError(f"--launcher: there is no program {task.launcher[0]!r}")
    budgets = task.budgets
    if not budgets and section.budget is not None:
        parse_budget(section.budget)
        budgets = (str(section.budget),)
    return replace(task, budgets=budgets, level=section.level if task.level is None else task.level)


@dataclass(slots=True)
class Run:
    """One run of the script."""

    name: str
    kind: str
    memory: dict[str, Any]
    """The section's part that it ran with."""
    decision: dict[str, Any] | None = None
    measured_bytes: int | None = None
    """Of the rank that takes the most."""
    seconds_per_step: float | None = None
    """The fastest step but the first, of the slowest rank: other processes make steps slower, never faster."""
    step_seconds: list[float] = field(default_factory=list)
    ranks: int = 0
    error: str = ""
    """Why there is no plan."""

    @property
    def predicted_bytes(self) -> int | None:
        """Peak that was predicted, if any."""
        return self.decision["predicted_bytes"] if self.decision is not None else None

    @property
    def off(self) -> float | None:
        """Share of the prediction by which the measurement differs."""
        if not self.predicted_bytes or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.predicted_bytes - 1

    def wrong(self) -> list[str]:
        """Return what is wrong with it, in words."""
        found = []
        budget = self.decision["budget_bytes"] if self.decision is not None else None
        if budget is not None and self.measured_bytes is not None and self.measured_bytes > budget:
            found.append(f"{self.name}: the measured peak is above it by {self.measured_bytes / budget - 1:.1%}")
        if self.off is not None and is_wrong(self.predicted_bytes, self.measured_bytes):
            found.append(f"{self.name}: the measured peak is {against(self.off)}")
        return found


@dataclass(slots=True)
class Report:
    """What the runs have shown."""

    script: str
    config: str
    command: list[str]
    runs: list[Run]

    @property
    def plans(self) -> list[Run]:
        """The runs for a budget that found a plan."""
        return [run for run in self.runs if run.kind == BUDGET and run.decision is not None]

    @property
    def without(self) -> Run | None:
        """The run that computes nothing again."""
        return next((run for run in self.runs if run.kind == WITHOUT), None)

    @property
    def wrong(self) -> list[str]:
        """What does not hold, in words."""
        return [words for run in self.runs for words in run.wrong()]

    @property
    def failed(self) -> list[Run]:
        """The runs without a plan."""
        return [run for run in self.runs if run.error]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        runs = [{**asdict(run), "predicted_bytes": run.predicted_bytes, "off": run.off} for run in self.runs]
        ok = not self.wrong and not self.failed
        return {"ok": ok, "wrong": self.wrong, "script": self.script, "config": self.config,
                "command": self.command, "runs": runs}  # fmt: skip


def read_section(path: Path) -> MemoryConfig:
    """Return the ``memory`` part of a DeepSpeed JSON whose section runs the model in ONNX Runtime.

    Raises:
        ConfigError: names the file, and what is wrong.
    """
    content = read_json(path, "the config")
    try:
        section = section_config.section_of(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if section is None:
        raise ConfigError(f'{path} has no enabled section "{section_config.SECTION}": add "ort_zero": {{}} to it')
    if not section.ortmodule.enabled:
        raise ConfigError(f'{path} has "ortmodule": {{"enabled": false}}: memory is planned for ONNX Runtime')
    return section.memory


def plan(task: Task, tell: Callable[[int, int, str], None] = lambda done, of, what: None) -> Report:
    """Run the script for each plan, and return what that has shown.

    Args:
        task: see :class:`Task`.
        tell: called before each run with the number of runs done, of all, and its name.

    Raises:
        ScriptError: the script failed, or trained nothing.
        MemoryPlanError: no budget can be kept.
    """
    wanted = [(f"budget {budget}", BUDGET, task.memory("auto", budget)) for budget in task.budgets]
    wanted = wanted or [("budget of the free memory", BUDGET, task.memory("auto"))]
    if task.steps:
        wanted.insert(0, (WITHOUT, WITHOUT, task.memory("off")))
    report = Report(str(task.script), str(task.config), task.command, [])
    total = len(wanted) + (task.points if task.steps else 0)
    for name, kind, memory in wanted:
        tell(len(report.runs), total, name)
        report.runs.append(_run(task, Run(name, kind, memory)))
    if not report.plans:
        raise MemoryPlanError(report.failed[0].error)
    if task.steps:
        for n, counts in enumerate(between(report.plans[0].decision, task.points), 1):
            tell(len(report.runs), total, f"point {n}")
            report.runs.append(_run(task, Run(f"point {n}", POINT, task.memory(counts))))
    tell(total, total, "done")
    return report


def between(decision: Mapping[str, Any], number: int) -> list[list[str]]:
    """Return so many plans of a predicted path, evenly spaced by their peaks, the one of the least memory last."""
    path = [(size, counts) for size, _, counts in decision["path"] if counts]
    if not path or not number:
        return []
    most, least = decision["unconstrained_bytes"], min(size for size, _ in path)
    found: list[list[str]] = []
    for n in range(1, number + 1):
        aim = most + (least - most) * n / number
        counts = min(path, key=lambda point: abs(point[0] - aim))[1]
        if counts not in found and sorted(counts) != sorted(decision["plan"]):
            found.append(counts)
    return found


def _run(task: Task, run: Run) -> Run:
    """Run the script with what `run` says, and note there what it has shown."""
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as name:
        folder = Path(name)
        order, report, log = folder / "order.json", folder / "report", folder / "log"
        Order(run.memory, task.steps, str(report)).write(order)
        status = _start_and_wait(task.command, order, report, log)
        outcomes = read_outcomes(report)
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    failed = [outcome for outcome in outcomes if outcome.state == FAILED]
    done = [outcome for outcome in outcomes if outcome.state == DONE]
    if failed:
        # the rank that failed itself tells it better than those that heard of it
        told = min(failed, key=lambda outcome: outcome.error_type == RankError.__name__)
        if told.error_type == MemoryPlanError.__name__ and run.kind == BUDGET:
            run.error = told.error
            return run
        raise ScriptError(f"{run.name}: {told.error}", tail)
    if not done or done[0].rank != 0:
        raise ScriptError(_why(task, run, status, outcomes), tail)
    return _noted(run, done)


def _noted(run: Run, done: Sequence[Outcome]) -> Run:
    first = done[0]
    run.decision, run.step_seconds, run.ranks = first.decision, first.step_seconds, len(done)
    run.measured_bytes = max((o.measured_bytes for o in done if o.measured_bytes is not None), default=None)
    if run.decision is not None:
        run.decision["measured_bytes"] = run.measured_bytes
    # the first step finds memory and caches cold
    fastest = [min(o.step_seconds[1:] or o.step_seconds) for o in done if o.step_seconds]
    run.seconds_per_step = max(fastest, default=None)
    return run


def _why(task: Task, run: Run, status: int, outcomes: Sequence[Outcome]) -> str:
    """Return why there is no report, in a line."""
    if status:
        return f"{run.name}: {task.script} ended with status {status} before its steps were done"
    if not outcomes:
        return (
            f"{task.script} made no DeepSpeed engine that runs in ONNX Runtime; it has to use the section of "
            f"{task.config} (arguments for the script go behind --)"
        )
    steps = f"{task.steps} training steps" if task.steps else "a training step"
    return (
        f"{task.script} ended before {steps} of {outcomes[0].model} (each a call in training mode with its backward) "
        "were done; let it run longer, or ask for fewer with --steps"
    )


def _start_and_wait(command: Sequence[str], order: Path, report: Path, log: Path) -> int:
    """Run a command with its output in `log`; return its status. No process of it outlives the call."""
    # nothing else differs from the user's own start: another PATH would make DeepSpeed compile its operators again
    environment = {**os.environ, env.MEMORY_SESSION: str(order), "PYTHONUNBUFFERED": "1"}
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
            if until is None and any(o.state == DONE for o in read_outcomes(report)):
                until = now + _GRACE
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


def _found(program: str) -> str | None:
    """Return the path of a launcher, first of those installed beside this Python."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.is_file() else shutil.which(program)


def words_of(launcher: str) -> tuple[str, ...]:
    """Return the words of a launcher's command line.

    Raises:
        ConfigError: a quote is not closed, or there are none.
    """
    try:
        words = tuple(shlex.split(launcher))
    except ValueError as error:
        raise ConfigError(f"--launcher {launcher!r}: {error}") from None
    if not words:
        raise ConfigError("--launcher is empty")
    return words


def check_target(path: Path, option: str, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before minutes of work.

    Raises:
        ConfigError: it exists and is not to be replaced, or its folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not overwrite:
        raise ConfigError(f"{option} {path} exists; give --overwrite to replace it, or name another file")


def write_plan(path: Path, plan: Sequence[str]) -> None:
    """Write a plan in the form that ORT reads, in place of an earlier one.

    Raises:
        ConfigError: the file cannot be written.
    """
    replace_by(path, json.dumps(list(plan), indent=1) + "\n")


def replace_by(path: Path, content: str) -> None:
    """Write a file in whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_text(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
