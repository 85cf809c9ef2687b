"""Compare the profiles of a script in ONNX Runtime and in PyTorch: one table whose rows add up to a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ort_zero.profiling.breakdown import KERNEL
from ort_zero.profiling.exchange import Part, RankProfile
from ort_zero.profiling.operator_groups import group_of
from ort_zero.profiling.trace import NAMES
from ort_zero.utils import tables

_NAMED = 3
"""Maximum number of operators that are named in a row of the table."""
_SMALL = 0.002
"""Share of a step below which rows of the table are added up in one row."""
_SLOWED = 1.3
"""Factor by which the profilers may lengthen a step without a note."""


@dataclass(frozen=True, slots=True)
class Side:
    """One backend's profile, the mean of its ranks."""

    step_seconds: float
    """Median time of a step without profilers, of the slowest rank."""
    parts: tuple[Part, ...]
    """Parts of a step, the longest first; their seconds add up to `step_seconds`."""
    slowed: float
    """Factor by which the profilers made a step longer."""
    ranks: int
    graphs_built: int

    @classmethod
    def of(cls, ranks: Sequence[RankProfile]) -> Side:
        """Return the mean of the ranks' profiles: shares from the profilers, of the time without profilers."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        calls: dict[tuple[str, str], float] = defaultdict(float)
        for rank in ranks:
            for part in rank.parts:
                seconds[part.kind, part.name] += part.seconds
                calls[part.kind, part.name] += part.calls / len(ranks)
        step = max(rank.step_seconds for rank in ranks)
        share = step / (sum(seconds.values()) or 1.0)
        parts = [Part(kind, name, time * share, calls[kind, name]) for (kind, name), time in seconds.items()]
        return cls(
            step_seconds=step,
            parts=tuple(sorted(parts, key=lambda part: -part.seconds)),
            slowed=max(rank.profiled_seconds for rank in ranks) / step,
            ranks=len(ranks),
            graphs_built=max(rank.graphs_built for rank in ranks),
        )

    def rows(self) -> dict[str, list[Part]]:
        """Return the parts by row of the table: a group of operators, or another kind of part."""
        rows: dict[str, list[Part]] = defaultdict(list)
        for part in self.parts:
            rows[group_of(part.name) if part.kind == KERNEL else part.kind].append(part)
        return rows


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of one row in ONNX Runtime and in PyTorch, and the operators, the longest first."""

    name: str
    ort: float
    torch: float
    ort_operators: tuple[str, ...] = ()
    torch_operators: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """Seconds in ONNX Runtime minus seconds in PyTorch."""
        return self.ort - self.torch


@dataclass(frozen=True, slots=True)
class Comparison:
    """The profiles of a script in ONNX Runtime and in PyTorch."""

    script: str
    model: str
    steps: int
    ort: Side
    torch: Side

    def rows(self) -> list[Row]:
        """Return the rows of both sides, the largest difference first."""
        ours, theirs = self.ort.rows(), self.torch.rows()
        rows = []
        for name in ours.keys() | theirs.keys():
            sides = [side.get(name, []) for side in (ours, theirs)]
            ort, torch = (sum(part.seconds for part in side) for side in sides)
            of_ort, of_torch = (tuple(part.name for part in side if part.name) for side in sides)
            rows.append(Row(name, ort, torch, of_ort, of_torch))
        return sorted(rows, key=lambda row: (-abs(row.difference), row.name))

    def as_dict(self) -> dict[str, Any]:
        """Return the output of ``ort-zero profile --json``; times in seconds."""
        return {
            "script": self.script,
            "model": self.model,
            "steps": self.steps,
            "ort": asdict(self.ort),
            "torch": asdict(self.torch),
            "rows": [{**asdict(row), "difference": row.difference} for row in self.rows()],
        }

    def text(self) -> str:
        """Return the time of a step, and its division into parts, as a table."""
        ranks = f", mean of {self.ort.ranks} ranks" if self.ort.ranks > 1 else ""
        step = Row("a step", self.ort.step_seconds, self.torch.step_seconds)
        rows = self.rows()
        small = [row for row in rows if max(row.ort, row.torch) < _SMALL * max(step.ort, step.torch)]
        shown = [row for row in rows if row not in small]
        if small:
            shown.append(Row("the rest", sum(row.ort for row in small), sum(row.torch for row in small)))
        head = ["", *NAMES.values(), "difference", *(f"of {name}" for name in NAMES.values())]
        lines = [head, _cells("", step), *(_cells("  ", row) for row in shown)]
        return "\n".join([
            f"{self.script}: {self.model}, {self.steps} steps in ONNX Runtime and in PyTorch{ranks}", "",
            *tables.aligned(lines, right={1, 2, 3}), *self._notes(),
        ])  # fmt: skip

    def _notes(self) -> list[str]:
        notes = []
        if self.ort.graphs_built:
            notes.append(f"note: {self.ort.graphs_built} graphs were built during these steps: give a larger --warmup")
        slowed = max(self.ort.slowed, self.torch.slowed)
        if slowed > _SLOWED:
            notes.append(
                f"note: the profilers make a step {slowed:.1f} times as long: parts with many short calls seem too long"
            )
        return notes


def _cells(indent: str, row: Row) -> list[str]:
    times = (f"{1000 * row.ort:.2f} ms", f"{1000 * row.torch:.2f} ms", f"{1000 * row.difference:+.2f} ms")
    operators = (", ".join(names[:_NAMED]) for names in (row.ort_operators, row.torch_operators))
    return [indent + row.name, *times, *operators]
