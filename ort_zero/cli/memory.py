"""Run ``ort-zero memory plan``: show what memory budgets would have units compute again, and what that costs.

Each rank of the script divides the graphs of its units for each budget at the end of the first step.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero.cli import add_command, print_result
from ort_zero.cli.script_options import add_script, reports_of
from ort_zero.errors import ConfigError
from ort_zero.utils.sizes import binary_size, parse_share_or_size

_EPILOG = """The script must use the same DeepSpeed JSON: pass it as the script expects it, after --. It is started
once, unchanged, and ended after its first step. Exit status: 0 = planned; 2 = no plan."""
_BUDGETS = ("80%", "60%", "40%", "20%")
"""What is planned where neither the command nor the section names a budget."""
_LISTED = 5
"""Operators that a line names."""


def add_parser(subparsers: argparse._SubParsersAction) -> tuple[argparse.ArgumentParser, ...]:
    """Add the command and return its parser."""
    text = "plan which activations are computed again in the backward, so that a step fits into less memory"
    group = subparsers.add_parser("memory", help=text, description=text, allow_abbrev=False)
    commands = group.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    text = "show what a memory budget would have units compute again, for the real model and batch"
    parser = add_command(commands, "plan", text, _EPILOG)
    add_script(parser)
    parser.add_argument("--config", required=True, metavar="DS.json", help="DeepSpeed JSON with the ort_zero section")
    text = "maximum memory of a step, or percentage of a step's memory without recomputation; repeatable "
    text += "(default: the section's, else some percentages)"
    parser.add_argument("--budget", action="append", default=[], metavar="6GiB|65%", help=text)
    parser.set_defaults(command="memory plan")
    return (parser,)


def run(args: argparse.Namespace) -> int:
    """Run one step of the script, print what each budget would have its units compute again, and return 0."""
    from ort_zero import config, env

    section = config.read_section(Path(args.config))
    if section.engine() == "ortmodule":
        raise ConfigError(
            'onnxruntime-training plans its own memory: set "memory": {"recompute": "auto", "budget": ...} and read '
            'the table that it prints, or plan with "backend": "compile"'
        )
    budget = section.memory.budget
    budgets = args.budget or ([str(budget)] if budget is not None else _BUDGETS)
    for each in budgets:
        try:
            parse_share_or_size(each)
        except ValueError as error:
            raise ConfigError(f"--budget: {error}") from None
    none = "no model of it ended a step with units"
    reports = reports_of(args, "planning", "step", env.MEMORY_TRIAL, {"budgets": budgets}, none)
    plans = max(reports, key=lambda plans: plans[0]["kept_without"])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_result(args, {"script": args.script, "plans": plans}, "\n".join(lines_of(plans, width)))
    return 0


def lines_of(plans: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """Return plans as lines of text: one for each budget, and below it one for each module."""
    kept = binary_size(plans[0]["kept_without"])
    lines = [f"Without recomputation a forward keeps {kept} for the backward, besides parameters."]
    for plan in plans:
        missed = "" if plan["fits"] else ", more than the budget: the least that can be kept"
        lines += [
            "",
            f"budget {plan['budget']}: {binary_size(plan['kept'])} kept{missed}; computed again: "
            f"{100 * plan['flops_share']:.1f} % of a step's floating-point operations in units",
        ]
        lines += [f"  {line}".rstrip()[:width] for line in _table(plan["modules"])]
    return [*lines, "", 'To train with one: "ort_zero": {"memory": {"recompute": "auto", "budget": ...}}']


def _table(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [f"{each['unit']}{each['module'] and '.'}{each['module']}" for each in modules]
    longest = max(map(len, names), default=0)
    return [
        f"{name:<{longest}}  {binary_size(each['freed']):>9} freed  {100 * each['flops_share']:4.1f} %  "
        f"{_listed(each['operators'])}"
        for name, each in zip(names, modules, strict=True)
    ]


def _listed(operators: Mapping[str, int]) -> str:
    names = sorted(operators, key=lambda name: -operators[name])
    more = len(names) - _LISTED
    return ", ".join([f"{operators[name]} {name}" for name in names[:_LISTED]] + [f"{more} others"] * (more > 0))
