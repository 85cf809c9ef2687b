"""Read two runs step by step, one step in memory at a time, and make tables of all ranks comparable.

Shards of partitioned tensors are merged. Tables of runs with different numbers of ranks become tables of one rank with
the batch of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.files import DESCRIPTION, Run
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS, SKETCH_COLUMNS, WIDTH, merge
from ort_zero.utils.progress import bar

_UNKNOWN = ("min", "max", "std", "abs_mean")
"""Numbers of a mean of gradients that do not follow from the numbers of the gradients."""


def side_by_side(runs: Sequence[Run], steps: Sequence[int], progress: bool) -> Iterator[list[list[Table]]]:
    """Yield for each step, which both runs have, a list of the tables of all ranks for each run."""

    def wanted(tables: Iterator[Table]) -> Iterator[Table]:
        return (table for table in tables if table.step in steps)

    streams = [[wanted(run.tables(rank)) for rank in run.ranks] for run in runs]
    with bar(len(steps), "comparing", "step", shown=progress) as shown:
        for _ in steps:
            yield [_gathered([next(tables) for tables in of_ranks]) for of_ranks in streams]
            shown.update()


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


# --- runs with different numbers of ranks -----------------------------------------------------------------------------


def whole_batches(runs: Sequence[Sequence[Table]]) -> list[list[Table]]:
    """Return for each run a list of one table, from the tables of all ranks of one step."""
    sizes = [sum(int(table.elements[table.batch_rows()].sum()) for table in tables) for tables in runs]
    if len(set(sizes)) > 1:
        raise StatisticsError(
            f"in step {runs[0][0].step}, the batches of all ranks together have {sizes[0]:,} and {sizes[1]:,} "
            "elements: runs with different numbers of ranks need the same global batch; have the script take its batch "
            "size from engine.train_micro_batch_size_per_gpu()"
        )
    return [[_of_all_ranks(tables)] for tables in runs]


def _of_all_ranks(tables: Sequence[Table]) -> Table:
    """Return the parameters, and the gradients of the mean of the ranks' losses: sketches are linear."""
    rows = [_rows_of_parameters(table) for table in tables]
    shared = [key for key in rows[0] if all(key in of_table for of_table in rows)]
    at = [np.array([of_table[key] for key in shared], np.int64) for of_table in rows]
    table, first = tables[0], at[0]
    numbers: dict[str, Any] = {name: getattr(table, name)[first].copy() for name in (*COLUMNS, "first", "sketch")}
    gradients = table.phase[first] == Phase.PARAMETER_GRADIENT
    mean = np.mean([one.sketch[index] for one, index in zip(tables, at)], axis=0)
    numbers["sketch"][gradients] = mean[gradients]
    numbers["l2"][gradients] = np.linalg.norm(mean[gradients], axis=1)
    numbers["mean"] = np.mean([one.mean[index] for one, index in zip(tables, at)], axis=0)
    for name in ("nan", "inf"):
        numbers[name] = np.max([getattr(one, name)[index] for one, index in zip(tables, at)], axis=0)
    for name in (*_UNKNOWN, "first"):
        numbers[name][gradients] = np.nan
    for name in DESCRIPTION:
        column = getattr(table, name)
        numbers[name] = column[first] if isinstance(column, np.ndarray) else [column[row] for row in first.tolist()]
    return dataclasses.replace(table, **numbers)


def _rows_of_parameters(table: Table) -> dict[tuple[int, str, str], int]:
    rows = np.flatnonzero((table.phase == Phase.PARAMETER) | (table.phase == Phase.PARAMETER_GRADIENT)).tolist()
    return {(int(table.phase[row]), table.module[row], table.slot[row]): row for row in rows}
