"""Plans with a user's own script: runs it once for each plan that is looked at, and holds what it measures together.

Imports neither torch nor onnxruntime: all that needs them happens in the script's process, see
:mod:`ort_zero.ortmodule.recompute.trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.errors import MemoryPlanError, RankError
from ort_zero.ortmodule.recompute.trial import DONE, FAILED, TrialRequest, TrialResult, read_results
from ort_zero.ortmodule.recompute.trial_report import BUDGET, POINT, WITHOUT, TrialReport, TrialRun
from ort_zero.ortmodule.recompute.trial_task import TrialTask
from ort_zero.utils.script_process import ScriptFailure, run_with_request


class ScriptError(ScriptFailure, MemoryPlanError):
    """The script did not get as far as it had to."""


def run_trials(task: TrialTask, tell: Callable[[int, int, str], None] = lambda done, of, what: None) -> TrialReport:
    """Run the script for each plan, and return what that has shown.

    Args:
        task: see :class:`TrialTask`.
        tell: called before each run with the number of runs done, of all, and its name.

    Raises:
        ScriptError: the script failed, or trained nothing.
        MemoryPlanError: no budget can be kept.
    """
    wanted = [(f"budget {budget}", BUDGET, task.memory("auto", budget)) for budget in task.budgets]
    wanted = wanted or [("budget of the free memory", BUDGET, task.memory("auto"))]
    if task.steps:
        wanted.insert(0, (WITHOUT, WITHOUT, task.memory("off")))
    report = TrialReport(str(task.script), str(task.config), task.command, [])
    total = len(wanted) + (task.points if task.steps else 0)
    for name, kind, memory in wanted:
        tell(len(report.runs), total, name)
        report.runs.append(_run(task, TrialRun(name, kind, memory)))
    if not report.plans:
        raise MemoryPlanError(report.failed[0].error)
    decision = report.plans[0].decision
    if task.steps and decision is not None:
        for n, counts in enumerate(between(decision, task.points), 1):
            tell(len(report.runs), total, f"point {n}")
            # the names of clusters are those of the graph that was planned
            fused = "on" if decision.get("fused_loss") else None
            report.runs.append(_run(task, TrialRun(f"point {n}", POINT, task.memory(counts), fused)))
    tell(total, total, "done")
    return report


def between(decision: Mapping[str, Any], number: int) -> list[list[str]]:
    """Return `number` plans of a predicted path, evenly spaced by their peaks, the one of the least memory last."""
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


def _run(task: TrialTask, run: TrialRun) -> TrialRun:
    """Run the script with what `run` says, and note there what it has shown."""

    def ask(request: Path, report: str) -> None:
        TrialRequest(run.memory, task.steps, report, run.fuse_loss).write(request)

    def is_done(results: Sequence[TrialResult]) -> bool:
        return any(result.state == DONE for result in results)

    asked = run_with_request(task.command, env.MEMORY_TRIAL, ask, read_results, is_done)
    failed = [result for result in asked.reports if result.state == FAILED]
    done = [result for result in asked.reports if result.state == DONE]
    if failed:
        # the rank that failed itself tells it better than those that heard of it
        reported = min(failed, key=lambda result: result.error_type == RankError.__name__)
        if reported.error_type == MemoryPlanError.__name__ and run.kind == BUDGET:
            run.error = reported.error
            return run
        raise ScriptError(f"{run.name}: {reported.error}", asked.tail)
    if not done or done[0].rank != 0:
        raise ScriptError(_why(task, run, asked.status, asked.reports), asked.tail)
    return _noted(run, done)


def _noted(run: TrialRun, done: Sequence[TrialResult]) -> TrialRun:
    first = done[0]
    run.decision, run.step_seconds, run.ranks = first.decision, first.step_seconds, len(done)
    run.measured_bytes = max((o.measured_bytes for o in done if o.measured_bytes is not None), default=None)
    if run.decision is not None:
        run.decision["measured_bytes"] = run.measured_bytes
    # the first step finds memory and caches cold
    fastest = [min(o.step_seconds[1:] or o.step_seconds) for o in done if o.step_seconds]
    run.seconds_per_step = max(fastest, default=None)
    return run


def _why(task: TrialTask, run: TrialRun, status: int, results: Sequence[TrialResult]) -> str:
    """Return why there is no report, in a line."""
    if status:
        return f"{run.name}: {task.script} ended with status {status} before its steps were done"
    if not results:
        return (
            f"{task.script} made no DeepSpeed engine that runs in ONNX Runtime; it has to use the section of "
            f"{task.config} (arguments for the script go behind --)"
        )
    steps = f"{task.steps} training steps" if task.steps else "a training step"
    return (
        f"{task.script} ended before {steps} of {results[0].model} (each a call in training mode with its backward) "
        "were done; let it run longer, or ask for fewer with --steps"
    )
