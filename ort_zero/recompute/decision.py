"""What is computed again in one training graph, and what that needs: the record that status and reports show."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_zero.recompute.candidates import Cluster, Entry
from ort_zero.recompute.graph_model import evaluate
from ort_zero.recompute.peak_memory import Peak
from ort_zero.recompute.planner import Point
from ort_zero.recompute.symbolic_savings import shortened_symbolic
from ort_zero.utils.sizes import binary_size


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one cluster of operators that can be computed again."""

    cluster: str
    kind: int
    frequency: int
    saving: int
    """Bytes of all its stashed values."""
    symbolic: str
    requested: int
    """-1: all; 0: not asked for."""
    actual: int
    seconds: float
    """Estimate of the time that computing it again takes in a step, for all its places in the graph."""
    note: str = ""


@dataclass(slots=True)
class Decision:
    """What is computed again in one graph, and what that needs."""

    mode: str
    rows: list[Row]
    plan: list[str]
    """In ORT's form."""
    unconstrained: Point
    chosen: Point
    least: Point | None = None
    budget: int | None = None
    """Bytes."""
    path: list[Point] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the named dimensions, as in the first call."""
    seconds: float = 0.0
    """Time that the planning took."""
    kept: str = ""
    """File in which the plan is stored; empty if it is not."""
    found: bool = False
    """Whether the plan was read from that file."""
    predicted: Peak | None = None
    """Peak of the graph that runs; None until its order of execution is known."""
    measured: int | None = None
    """Bytes by which the process grew in the first step."""

    @property
    def predicted_resident(self) -> int:
        """Bytes by which the process is predicted to grow in a step."""
        return (self.predicted or self.chosen).resident

    def in_words(self) -> list[tuple[str, str]]:
        """Return what is computed again and what it brings, line by line."""
        lines = [
            (f"{row.cluster} {row.actual} of {row.frequency}",
             f"-{binary_size(row.saving * row.actual / row.frequency)} of activations")
            for row in self.rows if row.actual
        ]  # fmt: skip
        budget = f", budget {binary_size(self.budget)}" if self.budget is not None else ""
        predicted, unconstrained = binary_size(self.predicted_resident), binary_size(self.unconstrained.resident)
        return [*lines, ("peak of a step", f"{predicted} predicted, {unconstrained} without{budget}")]

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as values that JSON can hold, as ``ort_zero.status()`` shows it."""
        return {
            "mode": self.mode,
            "plan": list(self.plan),
            "table": [dataclasses.asdict(row) for row in self.rows],
            "unconstrained_bytes": self.unconstrained.resident,
            "predicted_bytes": self.predicted_resident,
            "predicted_at": self.predicted.name if self.predicted else self.chosen.at,
            "measured_bytes": self.measured,
            "least_bytes": self.least.resident if self.least else None,
            "budget_bytes": self.budget,
            "recompute_seconds": round(self.chosen.seconds, 6),
            "sizes": dict(self.sizes),
            "seconds": round(self.seconds, 3),
            "kept": self.kept,
            "found": self.found,
            "path": [[point.resident, round(point.seconds, 6), plan_texts(point.counts)] for point in self.path],
        }


def table_rows(
    clusters: Mapping[str, Cluster],
    entries: Sequence[Entry],
    usable: Sequence[Entry],
    requested: Mapping[str, int],
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
) -> list[Row]:
    """Return the table of a decision, the cluster that saves most first.

    Args:
        clusters: all of the graph, by key.
        entries: all places where they can be applied.
        usable: those of the places that may be chosen.
        requested: how many places of each cluster were asked for, -1 for all.
        counts: how many were chosen.
        sizes: of the named dimensions.
    """
    free = Counter(entry.cluster for entry in usable)
    rows = []
    for key, cluster in clusters.items():
        mine = [entry for entry in entries if entry.cluster == key]
        note = ""
        if free[key] < len(mine):
            note = f"{len(mine) - free[key]} read weights that ZeRO-3 partitions"
        rows.append(
            Row(
                cluster.name,
                cluster.kind,
                len(mine) or cluster.frequency,
                # of what was not applied ORT's word has to do
                sum(entry.saving for entry in mine) if mine else evaluate(cluster.symbolic, sizes) or 0,
                shortened_symbolic(cluster.symbolic),
                requested.get(key, 0),
                counts.get(key, 0),
                sum(entry.seconds for entry in mine),
                note,
            )
        )
    return sorted(rows, key=lambda row: (-row.saving, row.cluster))


def plan_texts(counts: Sequence[tuple[str, int]]) -> list[str]:
    """Return a plan in ORT's form, ``["FastGelu+:1:8"]``."""
    return [f"{key}:{count}" for key, count in counts]
