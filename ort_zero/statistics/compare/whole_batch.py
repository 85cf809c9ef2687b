"""Make tables of runs with different numbers of ranks comparable: those of one rank with the batch of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS

_ARRAYS = ("phase", "order", "call", "caller", "occurrence", "source", "partitioned")
_LISTS = ("module", "kind", "slot", "dtype", "shape")
_UNKNOWN = ("min", "max", "std", "abs_mean")
"""Numbers of a mean of gradients that do not follow from the numbers of the gradients."""


def whole_batches(runs: Sequence[Sequence[Table]]) -> list[list[Table]]:
    """Return for each run a list of one table, from the tables of all ranks of one step.

    Raises:
        StatisticsError: the batches of all ranks together have different sizes.
    """
    sizes = [sum(_size_of_batch(table) for table in tables) for tables in runs]
    if len(set(sizes)) > 1:
        raise StatisticsError(
            f"in step {runs[0][0].step}, the batches of all ranks together have {sizes[0]:,} and {sizes[1]:,} "
            "elements: runs with different numbers of ranks need the same global batch; have the script take its batch "
            "size from engine.train_micro_batch_size_per_gpu()"
        )
    return [[_of_all_ranks(tables)] for tables in runs]


def _size_of_batch(table: Table) -> int:
    return int(sum(table.elements[row] for row in table.batch_rows()))


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
    columns: dict[str, Any] = {name: getattr(table, name)[first] for name in _ARRAYS}
    lists: dict[str, Any] = {name: [getattr(table, name)[row] for row in first.tolist()] for name in _LISTS}
    return dataclasses.replace(table, **columns, **lists, **numbers)


def _rows_of_parameters(table: Table) -> dict[tuple[int, str, str], int]:
    rows = np.flatnonzero((table.phase == Phase.PARAMETER) | (table.phase == Phase.PARAMETER_GRADIENT)).tolist()
    return {(int(table.phase[row]), table.module[row], table.slot[row]): row for row in rows}
