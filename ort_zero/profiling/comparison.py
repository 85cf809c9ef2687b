"""Compare the profiles of a script in ONNX Runtime and in PyTorch: one table whose rows add up to a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ort_zero.profiling.breakdown import KERNEL
from ort_zero.profiling.exchange import NAMES, Part, RankProfile
from ort_zero.profiling.operator_groups import group_of
from ort_zero.runtimes.runner import Runner
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
        longest_first = tuple(sorted(parts, key=lambda part: -part.seconds))
        return cls(step, longest_first, max(rank.profiled_seconds for rank in ranks) / step, len(ranks))


@dataclass(slots=True)
class Row:
    """The seconds of one row in ONNX Runtime and in PyTorch, and the operators, the longest first."""

    name: str
    ort: float = 0.0
    torch: float = 0.0
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
    runners: dict[str, Any] = field(default_factory=dict)
    """What runs the units of each class on rank 0, with the section on."""
    settled: bool = True
    """Whether it was settled by then what runs where."""

    def rows(self) -> list[Row]:
        """Return a row for each group of operators and each other kind of part, the largest difference first."""
        rows: dict[str, Row] = {}
        for which in NAMES:
            for part in getattr(self, which).parts:
                name = group_of(part.name) if part.kind == KERNEL else part.kind
                row = rows.setdefault(name, Row(name))
                operators = getattr(row, f"{which}_operators") + ((part.name,) if part.name else ())
                setattr(row, which, getattr(row, which) + part.seconds)
                setattr(row, f"{which}_operators", operators)
        return sorted(rows.values(), key=lambda row: (-abs(row.difference), row.name))

    def as_dict(self) -> dict[str, Any]:
        """Return the output of ``ort-zero profile --json``; times in seconds."""
        return {**asdict(self), "rows": [{**asdict(row), "difference": row.difference} for row in self.rows()]}

    def text(self) -> str:
        """Return the time of a step, and its division into parts, as a table."""
        ranks = f", mean of {self.ort.ranks} ranks" if self.ort.ranks > 1 else ""
        step = Row("a step", self.ort.step_seconds, self.torch.step_seconds)
        rest, shown = Row("the rest"), list[Row]()
        for row in self.rows():
            if max(row.ort, row.torch) >= _SMALL * max(step.ort, step.torch):
                shown.append(row)
            else:
                rest.ort, rest.torch = rest.ort + row.ort, rest.torch + row.torch
        shown += [rest] if rest.ort or rest.torch else []
        head = ["", *NAMES.values(), "difference", *(f"of {name}" for name in NAMES.values())]
        table = tables.aligned([head, _cells("", step), *(_cells("  ", row) for row in shown)], right={1, 2, 3})
        title = f"{self.script}: {self.model}, {self.steps} steps in ONNX Runtime and in PyTorch{ranks}"
        slowed = max(self.ort.slowed, self.torch.slowed)
        note = f"note: the profilers make a step {slowed:.1f} times as long: parts with many short calls seem too long"
        notes = [note] if slowed > _SLOWED else []
        if not self.settled:
            notes.append("note: it is not settled yet what runs where: give a larger --warmup, or profile once more")
        units = [f"{name}: {runners_of(found)}" for name, found in self.runners.items()]
        return "\n".join([title, "", *table, *notes, *units])


def runners_of(found: Mapping[str, Any]) -> str:
    """Return in words what runs the units of a class, and the times that were taken in this process."""
    units = ", ".join(f"{count} in {Runner(runner).title}" for runner, count in found["units"].items())
    by_time = sorted(found["ms"].items(), key=lambda item: item[1])
    times = ", ".join(f"{Runner(runner).title} {value:.2f} ms" for runner, value in by_time)
    return f"{units}" + (f"; a forward and a backward take: {times}" if times else "")


def _cells(indent: str, row: Row) -> list[str]:
    times = (f"{1000 * row.ort:.2f} ms", f"{1000 * row.torch:.2f} ms", f"{1000 * row.difference:+.2f} ms")
    operators = (", ".join(names[:_NAMED]) for names in (row.ort_operators, row.torch_operators))
    return [indent + row.name, *times, *operators]
