"""Describe compared records, with their statistics in both runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ort_zero.statistics.compare.comparison import ComparedRecord
from ort_zero.statistics.compare.distance import KIND_NAMES, NO_NUMBER
from ort_zero.statistics.compare.step_comparison import StepComparison
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS


class RecordView(Mapping):
    """The shape, dtype and statistics of one record, read from its table on demand."""

    __slots__ = ("_table", "_key", "_row")
    NAMES = ("shape", "dtype", *COLUMNS, "first")

    def __init__(self, table: Table, key: int, row: int):
        """Refer to a record.

        Args:
            table: the table of the record's step.
            key: row of the record.
            row: row with the statistics of the record.
        """
        self._table, self._key, self._row = table, key, row

    def __getitem__(self, name: str) -> Any:
        if name == "shape":
            return list(self._table.shape[self._key])
        if name == "dtype":
            return self._table.dtype[self._key]
        if name == "first":
            return self._table.first[self._row, : int(self._table.elements[self._row])].tolist()
        if name in COLUMNS:
            return getattr(self._table, name)[self._row].item()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    def __repr__(self) -> str:
        return repr(dict(self))


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
        a=RecordView(step.a, row, int(pairs.measured_a[index])),
        b=RecordView(step.b, int(pairs.row_b[index]), int(pairs.measured_b[index])),
    )


class StepRecords(Sequence):
    """The compared records of one step and rank, in order of execution, made on demand: only a report needs them."""

    def __init__(self, step: StepComparison):
        self._step, self._numbers = step, np.flatnonzero(step.pairs.comparable)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return record_of(self._step, int(self._numbers[index]))
