"""Statistics files for tests, and their rows as plain values; see the docstrings of ``Table`` and ``rows``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ort_zero.statistics.collect.writer import StatisticsWriter
from ort_zero.statistics.files import DESCRIPTION, file_name
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST, FIRST_COLUMNS, SKETCH, SKETCH_COLUMNS, WIDTH

MANIFEST_OF = {
    "backend": "torch",
    "zero_stage": 3,
    "dtype": "bfloat16",
    "model": "Net",
    "model_digest": "abc",
    "parameters": {"head.weight": [3, 4], "scale": []},
}


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


def statistics(seed: float, elements: int = 24) -> Statistics:
    rng = np.random.default_rng(int(seed * 1000))
    numbers = dict(zip(("min", "max", "mean", "std", "abs_mean", "l2"), rng.standard_normal(6).tolist()))
    counts = dict(zip(("negative", "positive", "zero", "nan", "inf"), rng.integers(0, 2**53, 5).tolist()))
    first = [math.nan, math.inf, -math.inf, -0.0, *rng.standard_normal(FIRST).tolist()][: min(FIRST, elements)]
    return Statistics(
        elements=elements, **numbers, **counts, first=tuple(first), sketch=tuple(rng.standard_normal(SKETCH).tolist())
    )


def records(step: int, count: int = 6) -> list[Record]:
    found = []
    for i in range(count):
        source = i - 1 if i % 3 == 2 else -1
        shape = ((), (0, 3), (2, 3, 4), (2**31, 2))[i % 4]
        found.append(
            Record(
                step=step,
                phase=Phase(i % 4),
                order=i,
                call=i // 2,
                caller=i // 2 - 1,
                module=("", "h.0", "h.0.né", "h.1")[i % 4],
                occurrence=1 + i // 4,
                kind=("input", "output", "inspect", "parameter")[i % 4],
                slot=("", "[0]", ".past[1][0]")[i % 3],
                source=source,
                shape=shape,
                dtype=("float32", "bfloat16", "int64")[i % 3],
                partitioned=i % 2 == 1,
                statistics=None if source >= 0 else statistics(step + i / 10, min(math.prod(shape), 2**40)),
            )
        )
    return found


def manifest_of(rank: int = 0, world: int = 1, run: str = "run-1", start: int = 0) -> dict:
    return {"run_id": run, "rank": rank, "world_size": world, "start_step": start, **MANIFEST_OF}


def begin(folder: Path, *about, override: bool = False) -> StatisticsWriter:
    return StatisticsWriter(folder, override=override, manifest=manifest_of(*about))


def write(folder: Path, *about, steps=(0, 1, 2), override: bool = False) -> Path:
    """Write the files of a rank; `about` are the arguments of :func:`manifest_of`."""
    writer = begin(folder, *about, override=override)
    for step in steps:
        writer.append(step, *columns_of(records(step)))
    writer.close()
    assert writer.path == folder / file_name(manifest_of(*about)["rank"], manifest_of(*about)["start_step"])
    return writer.path
