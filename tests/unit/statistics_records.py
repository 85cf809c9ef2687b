"""One row of a statistics file as plain values, which tests compare; see the docstrings of ``Table`` and ``rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.files import DESCRIPTION
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    elements: int
    min: float
    max: float
    mean: float
    std: float
    abs_mean: float
    l2: float
    negative: int
    positive: int
    zero: int
    nan: int
    inf: int
    first: tuple[float, ...]
    sketch: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    step: int
    phase: Phase
    order: int
    call: int
    caller: int
    module: str
    occurrence: int
    kind: str
    slot: str
    source: int
    shape: tuple[int, ...]
    dtype: str
    partitioned: bool
    statistics: Statistics | None


def statistics_of(row: np.ndarray) -> Statistics:
    numbers = row.tolist()
    named = {name: int(value) if name in COUNTS else value for name, value in zip(COLUMNS, numbers)}
    first = tuple(numbers[FIRST_COLUMNS][: named["elements"]])
    return Statistics(**named, first=first, sketch=tuple(numbers[SKETCH_COLUMNS]))


def record_of(table: Table, row: int) -> Record:
    described = {name: getattr(table, name)[row] for name in DESCRIPTION}
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in described.items()}
    statistics = None if plain["source"] >= 0 else statistics_of(table.raw(np.array([row]))[0])
    return Record(**plain | dict(step=table.step, phase=Phase(plain["phase"]), statistics=statistics))


def records_of(table: Table) -> list[Record]:
    return [record_of(table, row) for row in range(len(table))]


def columns_of(records: list[Record]) -> tuple[dict[str, list[Any]], np.ndarray]:
    """Return what ``StatisticsWriter.append`` takes after the step."""
    raw = np.zeros((len(records), WIDTH))
    for line, record in zip(raw, records):
        if (found := record.statistics) is not None:
            first = [*found.first, *[np.nan] * (FIRST - len(found.first))]
            line[:] = [*(getattr(found, name) for name in COLUMNS), *first, *found.sketch]
    return {name: [getattr(record, name) for record in records] for name in DESCRIPTION}, raw
