"""Compare the profiles of a script in ONNX Runtime and in PyTorch, and find the largest differences."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ort_zero.profiling.breakdown import KERNEL, KINDS, by_kind
from ort_zero.profiling.exchange import Part, RankProfile
from ort_zero.profiling.operator_groups import group_of

MAX_DIFFERENCES = 10
"""Maximum number of rows in the list of differences."""


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of one part of a step in ONNX Runtime and in PyTorch."""

    name: str
    ort: float
    torch: float
    ort_operators: tuple[Part, ...] = ()
    """The operators of this part, the longest first."""
    torch_operators: tuple[Part, ...] = ()

    @property
    def difference(self) -> float:
        """Seconds in ONNX Runtime minus seconds in PyTorch."""
        return self.ort - self.torch


@dataclass(frozen=True, slots=True)
class Side:
    """One backend's profile, the mean of its ranks."""

    parts: tuple[Part, ...]
    profiled_seconds: float
    """Median time of a step under the profilers, of the slowest rank."""
    timed_seconds: float | None
    """Median time of a step without profilers, of the slowest rank; None if the script ended before these steps."""
    ranks: int
    graphs_built: int
    nodes: int
    python_ops: int

    @classmethod
    def of(cls, ranks: Sequence[RankProfile]) -> Side:
        """Return the mean of the ranks' profiles."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        calls: dict[tuple[str, str], float] = defaultdict(float)
        for rank in ranks:
            for part in rank.parts:
                seconds[part.kind, part.name] += part.seconds / len(ranks)
                calls[part.kind, part.name] += part.calls / len(ranks)
        parts = [Part(kind, name, time, calls[kind, name]) for (kind, name), time in seconds.items()]
        timed = [statistics.median(rank.timed_seconds) for rank in ranks if rank.timed_seconds]
        return cls(
            parts=tuple(sorted(parts, key=lambda part: -part.seconds)),
            profiled_seconds=max(statistics.median(rank.profiled_seconds) for rank in ranks),
            timed_seconds=max(timed, default=None),
            ranks=len(ranks),
            graphs_built=max(rank.graphs_built for rank in ranks),
            nodes=ranks[0].nodes,
            python_ops=ranks[0].python_ops,
        )

    def operators(self, group: str) -> tuple[Part, ...]:
        """Return the operators of a group (see :mod:`.operator_groups`), the longest first."""
        return tuple(part for part in self.parts if part.kind == KERNEL and group_of(part.name) == group)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The profiles of a script in ONNX Runtime and in PyTorch."""

    script: str
    model: str
    steps: int
    ort: Side
    torch: Side

    @property
    def kinds(self) -> list[Row]:
        """One row for each kind of part, see :data:`~.breakdown.KINDS`."""
        ours, theirs = by_kind(self.ort.parts), by_kind(self.torch.parts)
        return [Row(kind, ours[kind], theirs[kind]) for kind in KINDS]

    @property
    def rows(self) -> list[Row]:
        """One row for each group of operators and each other kind; the largest difference first."""
        groups = {group_of(part.name) for side in (self.ort, self.torch) for part in side.parts if part.kind == KERNEL}
        rows = [row for row in self.kinds if row.name != KERNEL]
        for group in sorted(groups):
            ours, theirs = self.ort.operators(group), self.torch.operators(group)
            seconds, seconds_of_torch = (sum(part.seconds for part in parts) for parts in (ours, theirs))
            rows.append(Row(group, seconds, seconds_of_torch, ours, theirs))
        return sorted(rows, key=lambda row: -abs(row.difference))

    @property
    def differences(self) -> list[Row]:
        """The first :data:`MAX_DIFFERENCES` of :attr:`rows`, without rows of no difference."""
        return [row for row in self.rows[:MAX_DIFFERENCES] if row.difference]

    def as_dict(self) -> dict[str, Any]:
        """Return the output of ``ort-zero profile --json``; times in seconds."""
        return {
            "script": self.script,
            "model": self.model,
            "steps": self.steps,
            "ranks": self.ort.ranks,
            **{name: asdict(side) for name, side in (("ort", self.ort), ("torch", self.torch))},
            "kinds": [_row(row) for row in self.kinds],
            "differences": [_row(row) for row in self.differences],
        }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name, "ort": row.ort, "torch": row.torch, "difference": row.difference,
        "ort_operators": [part.name for part in row.ort_operators],
        "torch_operators": [part.name for part in row.torch_operators],
    }  # fmt: skip
