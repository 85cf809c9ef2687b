"""What the runs of a script under ``ort-zero memory plan`` have shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ort_zero.ortmodule.recompute.options import is_wrong
from ort_zero.ortmodule.recompute.plan_table import against

WITHOUT, BUDGET, POINT = "without recomputation", "budget", "point"
"""Kinds of runs."""


@dataclass(slots=True)
class TrialRun:
    """One run of the script."""

    name: str
    kind: str
    memory: dict[str, Any]
    """The section's part that it ran with."""
    fuse_loss: str | None = None
    """The section's ``ortmodule.fuse_loss`` that it ran with; None for the one in the file."""
    decision: dict[str, Any] | None = None
    measured_bytes: int | None = None
    """Bytes by which the process of the rank that takes the most has grown."""
    seconds_per_step: float | None = None
    """The fastest step but the first, of the slowest rank: other processes make steps slower, never faster."""
    step_seconds: list[float] = field(default_factory=list)
    ranks: int = 0
    error: str = ""
    """Why there is no plan."""

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted peak of the first step in bytes, which is measured; None where nothing was planned."""
        if self.decision is None:
            return None
        return self.decision.get("predicted_first_bytes", self.decision["predicted_bytes"])

    @property
    def off(self) -> float | None:
        """Share of the predicted peak by which the measured one differs from it; None without one of them."""
        if not self.predicted_bytes or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.predicted_bytes - 1

    def wrong(self) -> list[str]:
        """Return a sentence for each way in which the measured peak breaks the budget or the prediction."""
        found = []
        budget = self.decision["budget_bytes"] if self.decision is not None else None
        if budget is not None and self.measured_bytes is not None and self.measured_bytes > budget:
            found.append(f"{self.name}: the measured peak is above it by {self.measured_bytes / budget - 1:.1%}")
        predicted, measured = self.predicted_bytes, self.measured_bytes
        if self.off is not None and predicted and measured is not None and is_wrong(predicted, measured):
            found.append(f"{self.name}: the measured peak is {against(self.off)}")
        return found


@dataclass(slots=True)
class TrialReport:
    """The runs of a script under ``ort-zero memory plan``, with what they have shown."""

    script: str
    config: str
    command: list[str]
    runs: list[TrialRun]

    @property
    def plans(self) -> list[TrialRun]:
        """The runs for a budget that found a plan."""
        return [run for run in self.runs if run.kind == BUDGET and run.decision is not None]

    @property
    def without(self) -> TrialRun | None:
        """The run that computes nothing again."""
        return next((run for run in self.runs if run.kind == WITHOUT), None)

    @property
    def wrong(self) -> list[str]:
        """A sentence for each run whose measured peak breaks its budget or its prediction."""
        return [problem for run in self.runs for problem in run.wrong()]

    @property
    def failed(self) -> list[TrialRun]:
        """The runs without a plan."""
        return [run for run in self.runs if run.error]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold, as ``ort-zero memory plan --json`` prints it."""
        runs = [{**asdict(run), "predicted_bytes": run.predicted_bytes, "off": run.off} for run in self.runs]
        ok = not self.wrong and not self.failed
        return {"ok": ok, "wrong": self.wrong, "script": self.script, "config": self.config,
                "command": self.command, "runs": runs}  # fmt: skip
