"""Show what memory budgets would have the units compute again, and what that costs: ``ort-zero memory plan``.

The command runs the script to the end of its first step. There each rank divides the graphs of its units for each
budget, as a training with that budget would, and writes what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_zero import env
from ort_zero.errors import ConfigError, MemoryPlanError
from ort_zero.utils import script_process
from ort_zero.utils.sizes import binary_size

if TYPE_CHECKING:
    from ort_zero.backends.interface import MemoryPlanOptions
    from ort_zero.compile.memory import MemoryBudget

_BUDGETS = ("80%", "60%", "40%", "20%")
"""What is planned where neither the command nor the section names a budget."""
_LISTED = 5
"""Operators that a line names."""


class ScriptError(script_process.ScriptFailure, MemoryPlanError):
    """The error of a script that ended before its first step did."""


@dataclass(frozen=True)
class PlannedBudgets:
    """What the budgets would have the units of one model compute again."""

    script: str
    plans: Sequence[Mapping[str, Any]]
    """One entry for each budget, as :meth:`ort_zero.compile.memory.MemoryBudget.plan` returns it."""
    failed: tuple[()] = ()
    wrong: tuple[()] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"script": self.script, "plans": list(self.plans)}

    def text(self, width: int | None) -> str:
        """Return the report as lines: one for each budget, and below it one for each module."""
        kept = self.plans[0]["kept_without"]
        lines = [f"Without recomputation a forward keeps {binary_size(kept)} for the backward, besides parameters."]
        for plan in self.plans:
            missed = "" if plan["fits"] else ", more than the budget: the least that can be kept"
            lines += [
                "",
                f"budget {plan['budget']}: {binary_size(plan['kept'])} kept{missed}; computed again: "
                f"{100 * plan['flops_share']:.1f} % of a step's floating-point operations in units",
            ]
            lines += [f"  {line}".rstrip()[:width] for line in _table(plan["modules"])]
        return "\n".join(
            [*lines, "", 'To train with one: "ort_zero": {"memory": {"recompute": "auto", "budget": ...}}']
        )


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


def plan_memory(options: MemoryPlanOptions, tell: Callable[[int, int, str], None]) -> PlannedBudgets:
    """Run one step of a script; return what each budget would have its units compute again.

    Raises:
        ConfigError: an option that only the older engine has, a budget that is none, or a missing script.
        ScriptError: the script failed, or trained no step in the compile backend.
    """
    from ort_zero import config
    from ort_zero.utils.sizes import parse_share_or_size

    for name in ("level", "out", "plot"):
        if getattr(options, name) is not None:
            raise ConfigError(f'--{name} belongs to "backend": "ortmodule"; leave it out')
    script_process.require_script(options.script, options.launcher)
    section = config.read_section(options.config)
    budgets = options.budgets or ((str(section.memory.budget),) if section.memory.budget is not None else _BUDGETS)
    for budget in budgets:
        try:
            parse_share_or_size(budget)
        except ValueError as error:
            raise ConfigError(f"--budget: {error}") from None
    tell(0, 1, "first step")
    done = script_process.run_first_step(
        script_process.command_line(options.script, options.arguments, options.launcher),
        env.MEMORY_TRIAL,
        {"budgets": budgets},
    )
    tell(1, 1, "done")
    if not done.reports:
        why = f"it ended with status {done.status}" if done.status else "no model of it ended a step with units"
        raise ScriptError(f"{options.script} has no plan: {why}", done.tail if done.status else ())
    return PlannedBudgets(str(options.script), max(done.reports, key=lambda plans: plans[0]["kept_without"]))


def requested_budgets() -> Sequence[str]:
    """Return the budgets that ``ort-zero memory plan`` asks this process for; empty without a request."""
    request = env.memory_trial_file()
    return () if request is None else json.loads(request.read_text(encoding="utf-8"))["budgets"]


def plans_of(budget: MemoryBudget) -> list[dict[str, Any]]:
    """Return one plan for each budget that the command asks for."""
    return [budget.plan(text) for text in requested_budgets()]
