"""``ort-zero memory``: plans which activations a script's model computes again, and measures what that brings."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_zero.cli import print_json
from ort_zero.cli.script_options import add_launcher, positive, script_progress
from ort_zero.errors import MemoryPlanError

if TYPE_CHECKING:
    from ort_zero.ortmodule.recompute.trial_report import TrialReport, TrialRun
    from ort_zero.ortmodule.recompute.trial_task import TrialTask

_POINTS = 4
_EPILOG = """The script has to use the same DeepSpeed JSON: give it as the script expects it, behind --. It is started
unchanged, once without recomputation and once for each budget (with --plot for some points between as well), and
ended after --steps steps; what it writes until then (logs, folders) it writes here, too. Exit status: 0 = measured
within the budget; 1 = measured above it, or off the prediction by more than 10 percent and
16 MiB; 2 = it could not be planned."""


def add_parser(subparsers: argparse._SubParsersAction) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands and return their parsers."""
    text = "plan which activations are computed again in the backward, so that a step fits into less memory"
    parser = subparsers.add_parser("memory", help=text, description=text, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    return (_add_plan(commands),)


def _add_plan(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "find the cheapest recomputations that fit a budget, for the real model and batch; run and measure them"
    usage = "ort-zero memory plan --config DS.json --script train.py [options] [-- ARGUMENT ...]"
    parser = commands.add_parser("plan", help=text, description=text, epilog=_EPILOG, usage=usage)
    parser.add_argument("--config", required=True, metavar="DS.json", help="DeepSpeed JSON with the ort_zero section")
    parser.add_argument("--script", required=True, metavar="FILE", help="training script, as it is")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for the script, behind --")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="6GiB|65%",
        help="most memory of a step, or its share of what a step takes without recomputation; may be given several "
        "times (default: the section's, else 80%% of the memory that is free)",
    )
    parser.add_argument("--level", type=int, choices=(0, 1, 2), help="see docs/memory.md (default: the section's)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="steps of each run (default: 3)")
    add_launcher(parser)
    parser.add_argument("--out", metavar="plan.json", help="also write the plan, in the form that ORT reads")
    parser.add_argument("--plot", metavar="FILE.svg", help="also draw peak memory against the time of a step")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of --out and --plot")
    parser.add_argument("--no-measure", action="store_true", help="only predict: make the graphs, and run none")
    parser.set_defaults(command="memory plan", work=_plan)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command that was chosen and return its exit status."""
    return args.work(args)


def _plan(args: argparse.Namespace) -> int:
    from ort_zero.ortmodule.recompute import plan_command

    task = _task(args)
    with script_progress("planning", "run", args) as bar:
        report = plan_command.run_trials(task, bar.move)
    written = _write(args, report)
    print_json({**report.as_dict(), **written}) if args.json else print(text_of(report, _width(), written))
    if report.failed:
        return 2
    return 1 if report.wrong else 0


def _task(args: argparse.Namespace) -> TrialTask:
    """Return what is to be done, after everything that can be checked without running the script."""
    from ort_zero.errors import ConfigError
    from ort_zero.ortmodule.recompute import trial_task
    from ort_zero.utils import script_process
    from ort_zero.utils.output_files import check_output_file

    if args.out:
        check_output_file(Path(args.out), "--out", args.overwrite)
        if len(args.budget) > 1:
            raise ConfigError("--out holds one plan: give one --budget, or leave --out away")
    if args.plot:
        from ort_zero.ortmodule.recompute import plot

        if not args.plot.lower().endswith(".svg"):
            raise ConfigError(f"--plot {args.plot}: the picture is SVG, name the file .svg")
        check_output_file(Path(args.plot), "--plot", args.overwrite)
        plot.require()
    return trial_task.prepare(
        trial_task.TrialTask(
            config=Path(args.config),
            script=Path(args.script),
            arguments=tuple(args.arguments),
            budgets=tuple(args.budget),
            level=args.level,
            steps=0 if args.no_measure else args.steps,
            points=_POINTS if args.plot else 0,
            launcher=script_process.split_launcher(args.launcher) if args.launcher is not None else (),
        )
    )


def _write(args: argparse.Namespace, report: TrialReport) -> dict[str, Any]:
    """Write the files that were asked for; return their names."""
    from ort_zero.ortmodule.recompute import output_files
    from ort_zero.utils.output_files import write_output_file

    written: dict[str, Any] = {"out": None, "plot": None}
    found = _decision_of(report.plans[0])["plan"]
    if args.out and found:  # an empty list is no plan to anybody who reads it
        output_files.write_plan_file(Path(args.out), found)
        written["out"] = args.out
    if args.plot:
        from ort_zero.ortmodule.recompute import plot

        title = f"{Path(report.script).name}: peak memory against the time of a step"
        write_output_file(Path(args.plot), plot.svg(report.as_dict()["runs"], title))
        written["plot"] = args.plot
    return written


def text_of(report: TrialReport, width: int | None = None, written: dict[str, Any] | None = None) -> str:
    """Return what was planned and measured: each plan with its table, then all runs beside each other.

    Args:
        report: report of the runs.
        width: maximum length of the lines in characters; None does not limit it.
        written: names of files by option.
    """
    from ort_zero.ortmodule.recompute import plan_table

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
    from ort_zero.ortmodule.recompute import plan_table

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


def _width() -> int | None:
    """Return the terminal's width; lines that go into a file or a pipe are left as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
