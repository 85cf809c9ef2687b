"""Show what memory budgets would have compiled units compute again, and what that costs: ``ort-zero memory plan``.

The command runs the script to the end of its first step. There each rank divides the graphs of its units for each
budget, as a training with that budget would, and writes what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero.errors import ConfigError, MemoryPlanError
from ort_zero.utils import script_process
from ort_zero.utils.sizes import binary_size

_BUDGETS = ("80%", "60%", "40%", "20%")
"""What is planned where neither the command nor the section names a budget."""
_LISTED = 5
"""Operators that a line names."""


class ScriptError(script_process.ScriptFailure, MemoryPlanError):
    """Raised for a script that ends before its first training step is over."""


def run_plans(
    script: Path, arguments: Sequence[str], launcher: Sequence[str], budgets: Sequence[str]
) -> list[dict[str, Any]]:
    """Run one step of a script; return what each budget would have its units compute again.

    Each entry is as :meth:`ort_zero.compile.memory.MemoryBudget.plan` returns it.

    Args:
        script: the training script.
        arguments: its arguments.
        launcher: command before the script.
        budgets: shares or sizes; without any, some shares are planned.

    Raises:
        ConfigError: a budget is neither a share nor a size, or the script does not exist.
        ScriptError: the script failed, or trained no step in the compile backend.
    """
    from ort_zero import env
    from ort_zero.utils.sizes import parse_share_or_size

    script_process.require_script(script, launcher)
    for budget in budgets:
        try:
            parse_share_or_size(budget)
        except ValueError as error:
            raise ConfigError(f"--budget: {error}") from None
    command = script_process.command_line(script, arguments, launcher)
    done = script_process.run_with_request(command, env.MEMORY_TRIAL, {"budgets": budgets or _BUDGETS})
    if not done.reports:
        why = f"it ended with status {done.status}" if done.status else "no model of it ended a step with units"
        raise ScriptError(f"{script} has no plan: {why}", done.tail if done.status else ())
    return max(done.reports, key=lambda plans: plans[0]["kept_without"])


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
