"""Check that two runs can be compared, and describe what is left out and where their structures differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.rank_comparison import StepComparison
from ort_zero.statistics.naming import number_list, tensor_name
from ort_zero.statistics.reader import Run
from ort_zero.statistics.records import Phase, Table
from ort_zero.utils.text import shortened


def common_steps(a: Run, b: Run) -> tuple[int, ...]:
    """Return the steps that both runs have.

    Raises:
        StatisticsError: the runs have different models, or no step in common.
    """
    one, two = a.info, b.info
    if a.model_digest != b.model_digest:
        raise StatisticsError(
            f"{one.path} and {two.path} are runs of different models: {_model_difference(a, b)}; collect both with one "
            "model"
        )
    for info in (one, two):
        if not info.steps:
            raise StatisticsError(f"{info.path} has no full step that every rank has: collect it again")
    steps = sorted(set(one.steps) & set(two.steps))
    if not steps:
        raise StatisticsError(
            f"{one.path} and {two.path} have no step in common ({number_list(one.steps)} and "
            f"{number_list(two.steps)}): collect the same steps, with equal start_step and end_step"
        )
    return tuple(steps)


def _model_difference(a: Run, b: Run) -> str:
    one, two = a.parameters, b.parameters
    other = [f"{name} is {one[name]} and {two[name]}" for name in one if name in two and one[name] != two[name]]
    lone = [
        f"only the {which} has {shortened(names)}"
        for which, names in (("first", [n for n in one if n not in two]), ("second", [n for n in two if n not in one]))
        if names
    ]
    return "; ".join([*lone, *([shortened(other)] if other else [])]) or "their modules differ"


def notes_on_runs(a: Run, b: Run, steps: Sequence[int]) -> list[str]:
    """Return notes on steps that only one run has, and on different dtypes."""
    notes = []
    for run in (a, b):
        if rest := set(run.info.steps) - set(steps):
            notes.append(f"steps that only {run.info.path} has are left out: {number_list(sorted(rest))}")
    if a.info.dtype != b.info.dtype:
        notes.append(f"the runs have dtypes {a.info.dtype} and {b.info.dtype}: tolerances follow the coarser dtype")
    return notes


def notes_on_reference(a: Run, reference: Run, steps: Sequence[int]) -> list[str]:
    """Return notes on steps that the reference, a repetition of run `a`, lacks.

    Raises:
        StatisticsError: the reference cannot be compared with `a`.
    """
    common_steps(a, reference)
    rest = sorted(set(steps) - set(reference.info.steps))
    if rest:
        return [f"the reference {reference.info.path} lacks steps {number_list(rest)}: noise of earlier steps is used"]
    return []


def notes_on_structure(step: StepComparison) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, number of records that differ, note) for the differences in structure of one step of a rank.

    The number is 0 for a note that does not report a difference.
    """
    pairs, where = step.pairs, f"(step {step.step}, rank {step.rank})"
    a, b = pairs.a.table, pairs.b.table
    missing, extra = (
        [_full_name(table, row) for row in rows.tolist() if not _is_zero_gradient(table, row)]
        for table, rows in ((a, pairs.missing), (b, pairs.extra))
    )
    reordered = [_full_name(a, row) for row in pairs.row_a[pairs.reordered].tolist()]
    dtypes, sampled = np.flatnonzero(step.distances.dtype), np.flatnonzero(step.distances.sampled)
    several = [
        f"{_full_name(a, row_a)} ({step.a.dtype[row_a]} and {step.b.dtype[row_b]})"
        for row_a, row_b in zip(pairs.row_a[dtypes[:3]].tolist(), pairs.row_b[dtypes[:3]].tolist())
    ]
    names = ", ".join(_full_name(a, row) for row in pairs.row_a[sampled[:3]].tolist())
    for kind, count, text in (
        ("missing", len(missing), f"only the first run has {shortened(missing)}"),
        ("extra", len(extra), f"only the second run has {shortened(extra)}"),
        ("reordered", len(reordered), f"in another order: {shortened(reordered)}"),
        ("dtype", len(dtypes), f"in another dtype: {shortened(several, count=len(dtypes))}"),
    ):
        if count:
            yield kind, count, f"{text} {where}"
    if names:
        yield "sampled", 0, f"not compared, sampled differently: {names} {where}"


def _full_name(table: Table, row: int) -> str:
    name = ".".join(filter(None, (table.module[row], tensor_name(table.kind[row], table.slot[row]))))
    return f"the gradient of {name}" if table.phase[row] >= Phase.BACKWARD else name


def _is_zero_gradient(table: Table, row: int) -> bool:
    """Return True for a gradient of zeros, which is equal to no gradient."""
    gradient = table.phase[row] >= Phase.BACKWARD and table.source[row] < 0
    return bool(gradient and table.l2[row] == 0 and table.nan[row] == 0 and table.inf[row] == 0)
