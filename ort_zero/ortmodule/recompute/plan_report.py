"""Plan recomputation with a user's script for ``ort-zero memory plan``: checks, runs, files, text of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ort_zero.backends.interface import MemoryPlanOptions
from ort_zero.errors import ConfigError, MemoryPlanError
from ort_zero.ortmodule.recompute import output_files, plan_command, plan_table, plot, trial_task
from ort_zero.ortmodule.recompute.trial_report import TrialReport, TrialRun
from ort_zero.utils.output_files import check_output_file, write_output_file

_POINTS = 4


class PlanReport:
    """What was planned and measured, and the files that were written.

    Args:
        report: report of the runs.
        written: names of files by option, None for an option without one.
    """

    def __init__(self, report: TrialReport, written: dict[str, Any]):
        self._report = report
        self._written = written

    @property
    def failed(self) -> Sequence[TrialRun]:
        """The runs of the script that failed."""
        return self._report.failed

    @property
    def wrong(self) -> Sequence[str]:
        """One sentence for each measurement above its budget or off its prediction."""
        return self._report.wrong

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with the written files under ``"out"`` and ``"plot"``."""
        return {**self._report.as_dict(), **self._written}

    def text(self, width: int | None) -> str:
        """Return each plan with its table, then all runs beside each other, in lines no wider than `width`."""
        return text_of(self._report, width, self._written)


def plan(options: MemoryPlanOptions, tell: Callable[[int, int, str], None]) -> PlanReport:
    """Return the report; see :meth:`ort_zero.backends.interface.Backend.plan_memory`."""
    report = plan_command.run_trials(_task(options), tell)
    return PlanReport(report, _write(options, report))


def _task(options: MemoryPlanOptions) -> trial_task.TrialTask:
    """Return the task of the runs, after everything that can be checked without running the script."""
    if options.out is not None:
        check_output_file(options.out, "--out", options.overwrite)
        if len(options.budgets) > 1:
            raise ConfigError("--out holds one plan: give one --budget, or leave --out away")
    if options.plot is not None:
        if options.plot.suffix.lower() != ".svg":
            raise ConfigError(f"--plot {options.plot}: the picture is SVG, name the file .svg")
        check_output_file(options.plot, "--plot", options.overwrite)
        plot.require()
    return trial_task.prepare(
        trial_task.TrialTask(
            config=options.config,
            script=options.script,
            arguments=options.arguments,
            budgets=options.budgets,
            level=options.level,
            steps=options.steps,
            points=_POINTS if options.plot is not None else 0,
            launcher=options.launcher,
        )
    )


def _write(options: MemoryPlanOptions, report: TrialReport) -> dict[str, Any]:
    """Write the files that were asked for; return their names."""
    written: dict[str, Any] = {"out": None, "plot": None}
    found = _decision_of(report.plans[0])["plan"]
    if options.out is not None and found:  # an empty list is no plan to anybody who reads it
        output_files.write_plan_file(options.out, found)
        written["out"] = str(options.out)
    if options.plot is not None:
        title = f"{Path(report.script).name}: peak memory against the time of a step"
        write_output_file(options.plot, plot.svg(report.as_dict()["runs"], title))
        written["plot"] = str(options.plot)
    return written


def text_of(report: TrialReport, width: int | None = None, written: dict[str, Any] | None = None) -> str:
    """Return what was planned and measured: each plan with its table, then all runs beside each other.

    Args:
        report: report of the runs.
        width: maximum length of the lines in characters; None does not limit it.
        written: names of files by option.
    """
    lines: list[str] = []
    for one in report.plans:
        lines += [f"{one.name}{_ranks(one)}", "", plan_table.text(_decision_of(one), width), *_kept(one), ""]
    if report.without is not None:
        lines += [*_compared(report.runs, report.without, width), ""]
    lines += [f"{one.name}: {one.error}" for one in report.failed]
    lines += [f"{option}: {name}" for option, name in (written or {}).items() if name]
    if report.wrong:
        lines += [f"not as predicted: {words}" for words in report.wrong]
    elif report.without is not None and all(one.measured_bytes is None for one in report.runs):
        lines.append("not measured: this system does not tell a process's peak")
    elif not report.failed:
        lines.append("predicted, not measured" if report.without is None else "within the budget, as predicted")
    return "\n".join(lines)


def _ranks(one: TrialRun) -> str:
    return f", {one.ranks} ranks, the figures are those of one" if one.ranks > 1 else ""


def _decision_of(one: TrialRun) -> dict[str, Any]:
    """Return the decision of a run that found a plan."""
    if one.decision is None:
        raise MemoryPlanError(f"{one.name}: {one.error or 'no plan'}")
    return one.decision


def _kept(one: TrialRun) -> list[str]:
    decision = _decision_of(one)
    kept = decision["kept"]
    if not kept:
        return []
    how = ", ".join(f'"{key}": "{value}"' if isinstance(value, str) else f'"{key}": {value}'
                    for key, value in one.memory.items())  # fmt: skip
    since = "was there already" if decision["found"] else "is used at once by the next start"
    return [f'kept: {kept} ({since}, with "memory": {{{how}}})']


def _compared(runs: Iterable[TrialRun], without: TrialRun, width: int | None) -> list[str]:
    head = ("run", "predicted", "measured", "off by", "of without", "step", "of without")
    rows = []
    for one in runs:
        if one.error:
            continue
        seconds = one.seconds_per_step
        rows.append(
            (
                one.name,
                plan_table.mib(one.predicted_bytes),
                plan_table.mib(one.measured_bytes),
                "-" if one.off is None else plan_table.percent(one.off),
                _ratio(one.measured_bytes, without.measured_bytes),
                "-" if seconds is None else f"{1000 * seconds:.1f} ms",
                _ratio(seconds, without.seconds_per_step),
            )
        )
    return plan_table.aligned(head, rows, width)


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one is not None and other else "-"
