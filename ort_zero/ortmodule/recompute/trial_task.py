"""What ``ort-zero memory plan`` is to try: the script, its section, budgets and steps, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ort_zero import config as section_config
from ort_zero.ortmodule.recompute.options import parse_budget
from ort_zero.utils.script_process import command_line, require_script


@dataclass(frozen=True, slots=True)
class TrialTask:
    """What is to be planned; see :func:`prepare`."""

    config: Path
    script: Path
    arguments: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    """``"6GiB"``, ``"65%"``; none takes the section's, else a share of the memory that is free."""
    level: int | None = None
    """The section's ``level``; None takes the one in the configuration file."""
    steps: int = 3
    """Number of training steps of each run; 0 only predicts."""
    points: int = 0
    """Number of points of the predicted path that are measured besides the budgets."""
    launcher: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command line that starts the script, as a list of arguments."""
        return command_line(self.script, self.arguments, self.launcher)

    def memory(self, recompute: str | list[str], budget: str | None = None) -> dict[str, Any]:
        """Return a ``memory`` part of the section."""
        made: dict[str, Any] = {"recompute": recompute}
        if budget is not None:
            made["budget"] = budget
        if self.level is not None and recompute != "off":
            made["level"] = self.level
        return made


def prepare(task: TrialTask) -> TrialTask:
    """Return `task` with what the section says where it says nothing itself.

    Raises:
        ConfigError: a file or a value is wrong.
    """
    for budget in task.budgets:
        parse_budget(budget, "--budget")
    require_script(task.script, task.launcher)
    section = section_config.read_section(task.config).memory
    budgets = task.budgets
    if not budgets and section.budget is not None:
        parse_budget(section.budget)
        budgets = (str(section.budget),)
    return replace(task, budgets=budgets, level=section.level if task.level is None else task.level)
