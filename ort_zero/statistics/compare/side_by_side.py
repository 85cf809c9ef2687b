"""Read several runs step by step, one step in memory at a time, and merge the shards of partitioned tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ort_zero.statistics.reader import Run
from ort_zero.statistics.records import Table
from ort_zero.statistics.rows import COLUMNS, SKETCH_COLUMNS, WIDTH, merge
from ort_zero.utils.progress import bar


def side_by_side(runs: Sequence[Run], steps: Sequence[int], progress: bool) -> Iterator[list[list[Table]]]:
    """Yield for each step a list of the tables of all ranks for each run that has the step."""
    streams = [[_wanted_tables(run, rank, steps) for rank in run.ranks] for run in runs]
    with bar(len(steps), "comparing", "step", shown=progress) as shown:
        for step in steps:
            having = [of_ranks for run, of_ranks in zip(runs, streams) if step in run.info.steps]
            yield [_gathered([next(tables) for tables in of_ranks]) for of_ranks in having]
            shown.update()


def _wanted_tables(run: Run, rank: int, steps: Sequence[int]) -> Iterator[Table]:
    wanted = set(steps) & set(run.info.steps)
    return (table for table in run.tables(rank) if table.step in wanted)


def _gathered(tables: list[Table]) -> list[Table]:
    """Return one run's tables of all ranks with the shards of partitioned tensors merged."""
    if not any(table.partitioned.any() for table in tables):
        return tables
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
