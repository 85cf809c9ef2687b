"""Run ``ort-zero memory``: plan which activations a script's model computes again, and measure memory and time."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ort_zero.cli import print_json
from ort_zero.cli.script_options import add_launcher, script_progress
from ort_zero.errors import ConfigError

_EPILOG = """The script must use the same DeepSpeed JSON: pass it as the script expects it, after --. It is started
once, unchanged, and ended after its first step. Exit status: 0 = planned; 2 = no plan."""


def add_parser(subparsers: argparse._SubParsersAction) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands and return their parsers."""
    text = "plan which activations are computed again in the backward, so that a step fits into less memory"
    parser = subparsers.add_parser("memory", help=text, description=text, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    return (_add_plan(commands),)


def _add_plan(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "show what a memory budget would have units compute again, for the real model and batch"
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
        "(default: the section's, else some percentages)",
    )
    add_launcher(parser)
    parser.set_defaults(command="memory plan", work=_plan)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status."""
    return args.work(args)


def _plan(args: argparse.Namespace) -> int:
    from ort_zero import config
    from ort_zero.cli import memory_budgets
    from ort_zero.utils import script_process

    section = config.read_section(Path(args.config))
    if section.engine() == "ortmodule":
        raise ConfigError(
            'onnxruntime-training plans its own memory: set "memory": {"recompute": "auto", "budget": ...} and read '
            'the table that it prints, or plan with "backend": "compile"'
        )
    launcher = script_process.split_launcher(args.launcher) if args.launcher is not None else ()
    budget = section.memory.budget
    budgets = args.budget or ([str(budget)] if budget is not None else [])
    with script_progress("planning", "step", args):
        plans = memory_budgets.run_plans(Path(args.script), args.arguments, launcher, budgets)
    print_json({"script": args.script, "plans": plans}) if args.json else print(
        "\n".join(memory_budgets.lines_of(plans, _width()))
    )
    return 0


def _width() -> int | None:
    """Return the width of the terminal in characters, None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
