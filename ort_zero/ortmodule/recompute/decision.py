"""What is computed again in one training graph, and what that needs: the record that status and reports show."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_zero.ortmodule.recompute.candidates import Candidate, Cluster
from ort_zero.ortmodule.recompute.graph_model import evaluate
from ort_zero.ortmodule.recompute.peak_memory import Peak
from ort_zero.ortmodule.recompute.planner import Point
from ort_zero.ortmodule.recompute.symbolic_savings import shortened_symbolic
from ort_zero.utils.sizes import binary_size


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one cluster of operators that can be computed again."""

    cluster: str
    kind: int
    frequency: int
    saving: int
    """Bytes that computing it again at all its places saves: those of its stashed values."""
    symbolic: str
    requested: int
    """Number of its places that the user or the planner wants computed again; -1 for all, 0 for none."""
    actual: int
    seconds: float
    """Estimate of the time that computing it again takes in a step, for all its places in the graph."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a graph that the module gives to torch's activation checkpointing."""

    found: int
    """Number of blocks in the graph."""
    recomputed: int
    """Number of those of which anything is computed again."""
    nodes: int
    """Number of nodes that are computed again, all blocks together."""


@dataclass(slots=True)
class Decision:
    """What is computed again in one graph, and what that needs."""

    mode: str
    rows: list[Row]
    plan: list[str]
    """The plan in ORT's notation, such as ``["FastGelu+:1:8"]``."""
    unconstrained: Point
    chosen: Point
    least: Point | None = None
    budget: int | None = None
    """Bytes that a step may take; None without a budget."""
    path: list[Point] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Size of each named dimension in the first call, for which memory was planned."""
    seconds: float = 0.0
    """Seconds that the planning took."""
    plan_file: str = ""
    """File in which the plan is stored; empty if it is not."""
    from_store: bool = False
    """Whether the plan was read from that file."""
    predicted: Peak | None = None
    """Peak of the graph that runs; None until its order of execution is known."""
    measured: int | None = None
    """Bytes by which the process grew in the first step."""
    blocks: Blocks | None = None
    """The checkpointed blocks; None where the memory optimizer decides instead."""
    fused_loss: str = ""
    """Why head and loss are one node for the sake of the budget; empty where nobody has chosen that for it."""

    @property
    def predicted_resident(self) -> int:
        """Bytes by which the process is predicted to grow in a step."""
        return (self.predicted or self.chosen).resident

    @property
    def predicted_first(self) -> int:
        """Bytes by which the process is predicted to grow in the first step, which is the one that is measured."""
        return self.predicted.first if self.predicted is not None else self.chosen.resident

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return what is computed again and the bytes that it saves, as lines of a name and a text."""
        lines = [
            (f"{row.cluster} {row.actual} of {row.frequency}",
             f"-{binary_size(row.saving * row.actual / row.frequency)} of activations")
            for row in self.rows if row.actual
        ]  # fmt: skip
        if self.blocks is not None:
            found, again = self.blocks.found, self.blocks.recomputed
            lines.append(("checkpointed blocks", f"{again} of {found} computed again, {self.blocks.nodes} nodes"))
        if self.fused_loss:
            lines.append(("head and loss", f"one node: {self.fused_loss}"))
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
            "predicted_first_bytes": self.predicted_first,
            "predicted_at": self.predicted.name if self.predicted else self.chosen.at,
            "measured_bytes": self.measured,
            "least_bytes": self.least.resident if self.least else None,
            "budget_bytes": self.budget,
            "recompute_seconds": round(self.chosen.seconds, 6),
            "sizes": dict(self.sizes),
            "seconds": round(self.seconds, 3),
            "kept": self.plan_file,
            "found": self.from_store,
            "fused_loss": self.fused_loss,
            "blocks": dataclasses.asdict(self.blocks) if self.blocks is not None else None,
            "path": [[point.resident, round(point.seconds, 6), plan_texts(point.counts)] for point in self.path],
        }


def table_rows(
    clusters: Mapping[str, Cluster],
    candidates: Sequence[Candidate],
    usable: Sequence[Candidate],
    requested: Mapping[str, int],
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
) -> list[Row]:
    """Return the table of a decision, the cluster that saves most first.

    Args:
        clusters: all of the graph, by key.
        candidates: all places where they can be applied.
        usable: those of the places that may be chosen.
        requested: key of a cluster, to the number of its places that the user wants, -1 for all.
        counts: key of a cluster, to the number of its places that were chosen.
        sizes: size of each named dimension.
    """
    free = Counter(candidate.cluster for candidate in usable)
    rows = []
    for key, cluster in clusters.items():
        mine = [candidate for candidate in candidates if candidate.cluster == key]
        note = ""
        if free[key] < len(mine):
            note = f"{len(mine) - free[key]} read weights that ZeRO-3 partitions"
        rows.append(
            Row(
                cluster.name,
                cluster.kind,
                len(mine) or cluster.frequency,
                # for clusters that were not applied there is only ORT's estimate
                sum(candidate.saving for candidate in mine) if mine else evaluate(cluster.symbolic, sizes) or 0,
                shortened_symbolic(cluster.symbolic),
                requested.get(key, 0),
                counts.get(key, 0),
                sum(candidate.seconds for candidate in mine),
                note,
            )
        )
    return sorted(rows, key=lambda row: (-row.saving, row.cluster))


def plan_texts(counts: Sequence[tuple[str, int]]) -> list[str]:
    """Return a plan in ORT's notation, such as ``["FastGelu+:1:8"]``."""
    return [f"{key}:{count}" for key, count in counts]
