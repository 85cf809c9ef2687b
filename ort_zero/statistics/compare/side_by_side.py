"""Read several runs step by step, one step in memory at a time, and merge the shards of partitioned tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ort_zero.statistics.compare.layout import check_references, same_layout
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.reader import Run
from ort_zero.statistics.rows import COLUMNS, SKETCH_COLUMNS, WIDTH, merge
from ort_zero.utils.progress import bar


def side_by_side(
    runs: Sequence[Run], ranks: Sequence[int], steps: Sequence[int], progress: bool
) -> Iterator[list[list[Table | None]]]:
    """Yield for each step a list of tables per rank, one table per run; None if the reference lacks the step."""
    readers = [[_Reader(run, rank) for run in runs] for rank in ranks]
    with bar(len(steps), "comparing", "step", shown=progress) as shown:
        for step in steps:
            tables = [[reader.take(step) for reader in of_rank] for of_rank in readers]
            yield _gathered(tables)
            shown.update()


class _Reader:
    """The tables of one rank of one run, in ascending steps."""

    def __init__(self, run: Run, rank: int):
        self._tables = iter(run.tables(rank))
        self._name = f"{run.info.path}, rank {rank}"
        self._next: Table | None = None
        self._checked: Table | None = None

    def take(self, step: int) -> Table | None:
        """Return the table of a step, None if the run has no such step; steps must ascend."""
        while self._next is None or self._next.step < step:
            self._next = next(self._tables, None)
            if self._next is None:
                return None
        if self._next.step > step:
            return None
        table = self._next
        if self._checked is None or not same_layout(self._checked, table):
            check_references(table, self._name)
            self._checked = table
        return table


def _gathered(tables: list[list[Table | None]]) -> list[list[Table | None]]:
    """Return the tables with the shards of partitioned tensors merged over all ranks."""
    by_run = list(zip(*tables))
    gathered = [_gather(list(of_run)) for of_run in by_run]
    return [list(of_rank) for of_rank in zip(*gathered)]


def _gather(of_ranks: list[Table | None]) -> list[Table | None]:
    tables = [table for table in of_ranks if table is not None]
    if len(tables) != len(of_ranks) or not any(table.partitioned.any() for table in tables):
        return of_ranks
    rows = [np.flatnonzero(table.partitioned) for table in tables]
    keys = [[_part_key(table, row) for row in at.tolist()] for table, at in zip(tables, rows)]
    number = {key: i for i, key in enumerate(dict.fromkeys(key for of_table in keys for key in of_table))}
    parts = np.zeros((len(tables), len(number), WIDTH))
    indices = [np.array([number[key] for key in of_table], np.int64) for of_table in keys]
    for part, table, at, index in zip(parts, tables, rows, indices):
        part[index] = table.raw(at)
    whole = merge(parts)
    return [_replaced(table, at, whole[index]) for table, at, index in zip(tables, rows, indices)]


def _part_key(table: Table, row: int) -> tuple:
    return int(table.phase[row]), table.module[row], int(table.occurrence[row]), table.kind[row], table.slot[row]


def _replaced(table: Table, at: np.ndarray, raw: np.ndarray) -> Table:
    """Return a copy of a table with new statistics in the rows `at`; the first values remain this rank's values."""
    numbers = {**dict(zip(COLUMNS, raw.T)), "sketch": raw[:, SKETCH_COLUMNS]}
    columns = {name: getattr(table, name).copy() for name in numbers}
    for name, values in numbers.items():
        columns[name][at] = values
    return dataclasses.replace(table, **columns)
