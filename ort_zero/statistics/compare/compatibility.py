"""Check that two runs can be compared, and note the steps and ranks that are left out."""

from __future__ import annotations

from collections.abc import Sequence

from ort_zero.errors import StatisticsError
from ort_zero.statistics.naming import number_list
from ort_zero.statistics.reader import Run
from ort_zero.utils.text import shortened


def common_steps(a: Run, b: Run) -> tuple[int, ...]:
    """Return the steps that both runs have.

    Raises:
        StatisticsError: the runs have different models or numbers of ranks, or no rank or step in common.
    """
    one, two = a.info, b.info
    if a.model_digest != b.model_digest:
        raise StatisticsError(
            f"{one.path} and {two.path} are runs of different models: {_model_difference(a, b)}; collect both with one "
            "model"
        )
    if one.world_size != two.world_size:
        raise StatisticsError(
            f"{one.path} is a run of {one.world_size} ranks, {two.path} a run of {two.world_size}: each rank gets "
            "different data, collect both runs with the same number of ranks"
        )
    if not set(a.ranks) & set(b.ranks):
        raise StatisticsError(
            f"{one.path} has ranks {number_list(a.ranks)}, {two.path} {number_list(b.ranks)}: put the same ranks into "
            "both folders"
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
    shapes_a, shapes_b = getattr(a, "parameters", None) or {}, getattr(b, "parameters", None) or {}
    only_a = [name for name in shapes_a if name not in shapes_b]
    only_b = [name for name in shapes_b if name not in shapes_a]
    other = [name for name in shapes_a if name in shapes_b and tuple(shapes_a[name]) != tuple(shapes_b[name])]
    parts = []
    for names, text in ((only_a, "only the first has"), (only_b, "only the second has")):
        if names:
            parts.append(f"{text} {shortened(names)}")
    if other:
        parts.append(shortened([f"{name} is {tuple(shapes_a[name])} and {tuple(shapes_b[name])}" for name in other]))
    if not parts:
        return f"{a.info.model} and {b.info.model}" if a.info.model != b.info.model else "their modules differ"
    return "; ".join(parts)


def notes_on(a: Run, b: Run, steps: Sequence[int]) -> list[str]:
    """Return notes on steps and ranks that only one run has, and on different dtypes."""
    notes = []
    for run, other in ((a, b), (b, a)):
        rest = sorted(set(run.info.steps) - set(steps))
        if rest:
            notes.append(f"steps that only {run.info.path} has are left out: {number_list(rest)}")
        ranks = sorted(set(run.ranks) - set(other.ranks))
        if ranks:
            notes.append(f"ranks that only {run.info.path} has are left out: {number_list(ranks)}")
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
