"""Extract the errors of one step and rank in order of execution, for the report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ort_zero.statistics.compare.align import Pairs
from ort_zero.statistics.compare.comparison import Series
from ort_zero.statistics.compare.differences import RecordView
from ort_zero.statistics.compare.distance import KIND_NAMES
from ort_zero.statistics.compare.step_comparison import StepComparison
from ort_zero.statistics.naming import call_name, tensor_name
from ort_zero.statistics.records import Phase


def series_of(step: StepComparison, tolerance: np.ndarray, over: np.ndarray) -> Iterator[Series]:
    """Yield the errors of each phase of a step.

    Args:
        step: the comparison of one step of a rank.
        tolerance: tolerance of each pair.
        over: True for each pair that differs.
    """
    names = _module_names(step.pairs)
    for phase in Phase:
        chosen = np.flatnonzero((step.pairs.phase == phase) & step.pairs.comparable)
        if len(chosen):
            yield _series_of_phase(step, phase, chosen, tolerance, over, names)


def _series_of_phase(
    step: StepComparison, phase: Phase, chosen: np.ndarray, tolerance: np.ndarray, over: np.ndarray, names: list[str]
) -> Series:
    pairs, distances, table = step.pairs, step.distances, step.pairs.a.table
    rows_a, rows_b = pairs.row_a[chosen].tolist(), pairs.row_b[chosen].tolist()
    measured_a, measured_b = pairs.measured_a[chosen].tolist(), pairs.measured_b[chosen].tolist()
    return Series(
        step=step.step,
        rank=step.rank,
        phase=phase,
        modules=[names[number] for number in chosen.tolist()],
        tensors=[tensor_name(table.kind[row], table.slot[row]) for row in rows_a],
        errors=distances.error[chosen].tolist(),
        tolerances=tolerance[chosen].tolist(),
        kinds=[KIND_NAMES[kind] if is_over else "" for kind, is_over in zip(distances.kind[chosen], over[chosen])],
        a=[RecordView(step.a, row, measured) for row, measured in zip(rows_a, measured_a)],
        b=[RecordView(step.b, row, measured) for row, measured in zip(rows_b, measured_b)],
    )


def _module_names(pairs: Pairs) -> list[str]:
    table = pairs.a.table
    rows = pairs.row_a.tolist()
    several = {table.module[row] for row in rows if table.occurrence[row] > 1}
    return [
        call_name(table.module[row], table.occurrence[row]) if table.module[row] in several else table.module[row]
        for row in rows
    ]
