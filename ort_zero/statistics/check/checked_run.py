"""Check one run by all rules, and draw the result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ort_zero.errors import StatisticsError
from ort_zero.statistics.check.findings import Finding
from ort_zero.statistics.check.history import History, read_history
from ort_zero.statistics.check.rules import findings_in
from ort_zero.statistics.compare.report import rendered, write_page
from ort_zero.statistics.files import open_run
from ort_zero.statistics.naming import span
from ort_zero.statistics.records import RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """The findings in one run."""

    run: RunInfo
    findings: Sequence[Finding]
    """Findings that make the run unhealthy, in the order of steps."""
    hints: Sequence[Finding]
    """Findings that may be as the user wants them; they leave the run healthy."""
    notes: Sequence[str]
    """What was not recorded, and what was left out."""

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        seen = f"{self.run.world_size} rank{'s' * (self.run.world_size > 1)}, {span(self.run.steps)}"
        if not self.findings:
            count = len(self.hints)
            hints = f"; {count} hint{'s' * (count > 1)}: what may be meant so" if count else ""
            return f"healthy: no rule finds anything wrong in {seen}{hints}"
        first = self.findings[0]
        place = ", ".join(filter(None, (f"step {first.step}", f"rank {first.rank}", first.direction, first.place)))
        return f"{first.kind}: {place}: {first.text}"


def check(path: str | os.PathLike, progress: bool = False) -> CheckedRun:
    """Check the statistics of a run.

    Args:
        path: folder of the run.
        progress: show a progress bar.

    Raises:
        StatisticsError: the folder holds no run, no full step, or a run that is damaged.
    """
    run = open_run(path)
    if not run.info.steps:
        raise StatisticsError(f"{run.info.path} has no full step that every rank has: collect it again")
    history = read_history(run, progress)
    findings = merged(findings_in(history))
    return CheckedRun(
        run=run.info,
        findings=[finding for finding in findings if finding.certain],
        hints=[finding for finding in findings if not finding.certain],
        notes=[*run.notes, *_not_recorded(history)],
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once, where it shows first, in the order of steps; rules come in the order of causes."""
    kept: dict[tuple[str, str], Finding] = {}
    modules: dict[tuple[str, str], set[str]] = {}
    for finding in findings:
        key = finding.kind, finding.text
        modules.setdefault(key, set()).add(finding.module)
        if key not in kept or (finding.step, finding.rank) < (kept[key].step, kept[key].rank):
            kept[key] = finding
    counted = [replace(finding, others=len(modules[key]) - 1) for key, finding in kept.items()]
    return sorted(counted, key=lambda finding: finding.step)


def _not_recorded(history: History) -> list[str]:
    records = [record for rank in history.ranks for record in rank]
    updates = [update for record in records for update in record.updates]
    notes = []
    if not history.parameters_recorded:
        notes.append('parameters and optimizer steps were not recorded ("parameters": "off")')
    elif not updates and any(record.trains for record in records):
        notes.append("no step of a torch optimizer was seen: nothing is said about updates")
    if any(update.foreign_norm is not None and not update.gradients for update in updates):
        notes.append("ZeRO's optimizer holds flat copies: its gradients are not recorded by parameter")
    if any(record.partitioned for record in records):
        notes.append("ZeRO-3: each rank's shards are recorded, which replicas do not share")
    if len(history.ranks) > 1 and not (history.data_parallel or history.sharded):
        notes.append("the ranks are not known to be replicas: differences between them are hints")
    return notes


def write_check(checked: CheckedRun, path: str | os.PathLike) -> Path:
    """Write the findings as one HTML file, and replace an earlier report; for errors see ``write_report``."""
    return write_page(path, rendered("check.html", title=checked.verdict, c=checked, span=span(checked.run.steps)))
