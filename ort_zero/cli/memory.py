"""Run ``ort-zero memory``: plan which activations a script's model computes again, and measure memory and time."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ort_zero.cli import print_json
from ort_zero.cli.script_options import add_launcher, positive, script_progress
from ort_zero.errors import ConfigError

_EPILOG = """The script must use the same DeepSpeed JSON: pass it as the script expects it, after --. The compile
backend starts the script once, unchanged, and ends it after its first step; --level, --steps, --out, --plot and
--no-measure belong to ORTModule, which starts it once without recomputation and once for each budget (with --plot
also for some budgets between), and measures. Exit status: 0 = planned, and measured within the budget; 1 = measured
above the budget, or off the prediction by more than 10 percent and 16 MiB; 2 = no plan."""


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
    parser.add_argument("--script", required=True, metavar="FILE", help="training script, unchanged")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the script, after --")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="6GiB|65%",
        help="maximum memory of a step, or percentage of a step's memory without recomputation; repeatable "
        "(default: the section's, else some percentages, or 80%% of the free memory for ORTModule)",
    )
    parser.add_argument("--level", type=int, choices=(0, 1, 2), help="see docs/memory.md (default: the section's)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="steps of each run (default: 3)")
    add_launcher(parser)
    parser.add_argument("--out", metavar="plan.json", help="also write the plan, in the format of ONNX Runtime")
    parser.add_argument("--plot", metavar="FILE.svg", help="also draw peak memory against the time of a step")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of --out and --plot")
    parser.add_argument("--no-measure", action="store_true", help="only predict: make the graphs, but run none")
    parser.set_defaults(command="memory plan", work=_plan)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status."""
    return args.work(args)


def _plan(args: argparse.Namespace) -> int:
    from ort_zero.backends import loading
    from ort_zero.backends.interface import MemoryPlanOptions
    from ort_zero.utils import script_process

    engine, budget = loading.memory_options(Path(args.config))
    launcher = script_process.split_launcher(args.launcher) if args.launcher is not None else ()
    if engine == "compile":
        return _plan_budgets(args, launcher, args.budget or ([str(budget)] if budget is not None else []))
    options = MemoryPlanOptions(
        config=Path(args.config),
        script=Path(args.script),
        arguments=tuple(args.arguments),
        budgets=tuple(args.budget),
        level=args.level,
        steps=0 if args.no_measure else args.steps,
        launcher=launcher,
        out=Path(args.out) if args.out else None,
        plot=Path(args.plot) if args.plot else None,
        overwrite=args.overwrite,
    )
    with script_progress("planning", "run", args) as bar:
        report = loading.load(engine).plan_memory(options, bar.move)
    print_json(report.as_dict()) if args.json else print(report.text(_width()))
    if report.failed:
        return 2
    return 1 if report.wrong else 0


def _plan_budgets(args: argparse.Namespace, launcher: Sequence[str], budgets: Sequence[str]) -> int:
    from ort_zero.cli import memory_budgets

    for name in ("level", "out", "plot"):
        if getattr(args, name) is not None:
            raise ConfigError(f'--{name} belongs to "backend": "ortmodule"; leave it out')
    with script_progress("planning", "step", args):
        plans = memory_budgets.run_plans(Path(args.script), args.arguments, launcher, budgets)
    print_json({"script": args.script, "plans": plans}) if args.json else print(
        "\n".join(memory_budgets.lines_of(plans, _width()))
    )
    return 0


def _width() -> int | None:
    """Return the width of the terminal in characters, None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
