"""Describe compared records, with their statistics in both runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ort_zero.statistics.compare.comparison import ComparedRecord
from ort_zero.statistics.compare.distance import KIND_NAMES, NO_NUMBER
from ort_zero.statistics.compare.rank_comparison import StepComparison
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS


def record_of(step: StepComparison, index: int) -> ComparedRecord:
    """Return the pair with the number `index`."""
    pairs, distances = step.pairs, step.distances
    table, row = pairs.a.table, int(pairs.row_a[index])
    error, tolerance = float(distances.error[index]), float(step.tolerance[index])
    return ComparedRecord(
        step=step.step,
        rank=step.rank,
        phase=Phase(int(table.phase[row])),
        order=int(table.order[row]),
        module=table.module[row],
        occurrence=int(table.occurrence[row]),
        tensor=tensor_name(table.kind[row], table.slot[row]),
        kind=KIND_NAMES[distances.kind[index]] if error > tolerance else "",
        error=float("nan") if error >= NO_NUMBER else error,
        tolerance=tolerance,
        inherited=float(step.inherited[index]),
        a=_side(step.a, row, int(pairs.measured_a[index])),
        b=_side(step.b, int(pairs.row_b[index]), int(pairs.measured_b[index])),
    )


def _side(table: Table, key: int, row: int) -> dict[str, Any]:
    """Return shape, dtype, statistics and first values of a record, whose statistics are in the row `row`."""
    numbers = {name: getattr(table, name)[row].item() for name in COLUMNS}
    first = table.first[row, : numbers["elements"]].tolist()
    return {"shape": list(table.shape[key]), "dtype": table.dtype[key], **numbers, "first": first}


class StepRecords(Sequence):
    """The compared records of one step and rank, in order of execution, made on demand: only a report needs them."""

    def __init__(self, step: StepComparison):
        self._step, self._numbers = step, np.flatnonzero(step.pairs.comparable)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return record_of(self._step, int(self._numbers[index]))
