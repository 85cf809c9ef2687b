"""Describe differences in structure between two runs of a step: records of one run alone, another order or dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.step_comparison import StepComparison
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import Phase
from ort_zero.utils.text import shortened


@dataclass(frozen=True, slots=True)
class StructureNote:
    """A note on one kind of difference in structure in one step."""

    kind: str
    """Kind of the note: ``"missing"``, ``"dtype"``, ``"sampled"``, ... A report has one note of each kind."""
    count: int
    """Number of records that differ; 0 for a note that does not report a difference."""
    text: str


def structure_notes(step: StepComparison) -> Iterator[StructureNote]:
    """Yield notes on the differences in structure of one step of a rank."""
    pairs = step.pairs
    where = f"step {step.step}, rank {step.rank}"
    for kind, layout, lone, text in (
        ("missing", pairs.a, pairs.missing, "only the first run has"),
        ("extra", pairs.b, pairs.extra, "only the second run has"),
    ):
        rows = [row for row in lone.tolist() if not _is_zero_gradient(layout.table, row)]
        names = [_full_name(layout.table, row) for row in rows]
        yield StructureNote(kind, len(rows), f"{text} {shortened(names)} ({where})")
    names = [_full_name(pairs.a.table, row) for row in pairs.row_a[pairs.reordered].tolist()]
    yield StructureNote("reordered", len(names), f"in another order: {shortened(names)} ({where})")
    dtypes = np.flatnonzero(step.distances.dtype)
    names = [
        f"{_full_name(pairs.a.table, row_a)} ({step.a.dtype[row_a]} and {step.b.dtype[row_b]})"
        for row_a, row_b in zip(pairs.row_a[dtypes[:3]].tolist(), pairs.row_b[dtypes[:3]].tolist())
    ]
    yield StructureNote("dtype", len(dtypes), f"in another dtype: {shortened(names, count=len(dtypes))} ({where})")


def notes_on_samples(step: StepComparison) -> Iterator[StructureNote]:
    """Yield a note on tensors that could not be compared, as the two runs sampled them differently."""
    pairs = step.pairs
    sampled = np.flatnonzero(step.distances.sampled)
    if len(sampled):
        names = ", ".join(_full_name(pairs.a.table, row) for row in pairs.row_a[sampled[:3]].tolist())
        where = f"step {step.step}, rank {step.rank}"
        yield StructureNote("sampled", 0, f"not compared, sampled differently: {names} ({where})")


def note_on_parameters(step: StepComparison) -> Iterator[StructureNote]:
    """Yield a note if parameters were not collected."""
    if not (step.pairs.phase == Phase.PARAMETER).any() and step.step:
        yield StructureNote(
            "parameters",
            0,
            "parameters were not collected: after step 0, only errors much larger than slightly different parameters "
            "cause are found",
        )


def _full_name(table: Table, row: int) -> str:
    name = ".".join(filter(None, (table.module[row], tensor_name(table.kind[row], table.slot[row]))))
    return f"the gradient of {name}" if table.phase[row] >= Phase.BACKWARD else name


def _is_zero_gradient(table: Table, row: int) -> bool:
    """Return True for a gradient of zeros, which is equal to no gradient."""
    gradient = table.phase[row] >= Phase.BACKWARD and table.source[row] < 0
    return bool(gradient and table.l2[row] == 0 and table.nan[row] == 0 and table.inf[row] == 0)
