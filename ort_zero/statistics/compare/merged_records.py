"""Merge the records of one step of two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.distance import sketch_errors
from ort_zero.statistics.compare.layout import Key, Layout
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import module_name, tensor_name
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.PARAMETER, Phase.PARAMETER_GRADIENT)


@dataclass(slots=True)
class MergedRecord:
    """One record of two runs; the fields of a run without the record are None."""

    key: Key
    rows: tuple[int | None, int | None]
    numbers: list[tuple | None]
    differences: tuple | None
    """Differences of the numbers, each relative to the larger number; None if a run has no numbers."""
    error: float | None
    """Estimated l2 norm of the tensors' difference, relative to the larger norm; None if the shapes differ."""
    same_as: str
    """Name of the earlier record of the same tensor in both runs; empty if there is none."""

    @property
    def state(self) -> str:
        """The runs that have the record: ``"both"``, ``"only pt"`` or ``"only ort"``."""
        return "both" if None not in self.rows else "only pt" if self.rows[1] is None else "only ort"

    @property
    def module(self) -> str:
        """The module's name, with the number of the call from the second call on."""
        return _module_of(self.key)

    @property
    def tensor(self) -> str:
        """The tensor's name, with a number from the second tensor of the same name on."""
        return _tensor_of(self.key)


def _tensor_of(key: Key) -> str:
    _, _, _, kind, slot, again = key
    name = f"inspect.{slot}" if kind == "inspect" else tensor_name(kind, slot)
    return f"{name} ({again + 1})" if again else name


def _module_of(key: Key) -> str:
    return module_name(key[1], key[2])


def in_both_orders(a: list[Key], b: list[Key]) -> Iterator[Key]:
    """Yield the keys of `a` in order; a key of `b` alone follows the key of `a` that precedes it in `b`."""
    in_a = set(a)
    after: dict[Key | None, list[Key]] = {}
    last = None
    for key in b:
        if key in in_a:
            last = key
        else:
            after.setdefault(last, []).append(key)
    yield from after.get(None, ())
    for key in a:
        yield key
        yield from after.get(key, ())


def records_by_phase(layouts: tuple[Layout, Layout]) -> Iterator[tuple[Phase, list[MergedRecord]]]:
    """Yield each phase with its merged records in order of execution."""
    ordered = [[layout.keys[row] for row in layout.sequence.tolist()] for layout in layouts]
    rows = [{key: row for row, key in enumerate(layout.keys)} for layout in layouts]
    for phase in _PHASES:
        keys = list(in_both_orders(*([key for key in side if key[0] == phase] for side in ordered)))
        if keys:
            yield phase, _records(layouts, keys, [[row_of.get(key, -1) for key in keys] for row_of in rows])


def _records(layouts: tuple[Layout, Layout], keys: list[Key], rows: list[list[int]]) -> list[MergedRecord]:
    at = [np.array(side, np.int64) for side in rows]
    measured = [np.where(side >= 0, layout.measured[side], -1) for side, layout in zip(at, layouts)]
    numbers = [_numbers(layout.table, side) for layout, side in zip(layouts, measured)]
    comparable = (measured[0] >= 0) & (measured[1] >= 0)
    columns = [[getattr(layout.table, name)[side] for layout, side in zip(layouts, measured)] for name in COLUMNS]
    differences = list(zip(*(relative(*column).tolist() for column in columns)))
    errors = sketch_errors(layouts[0].table, layouts[1].table, measured[0], measured[1]).tolist()
    records = []
    for i, (key, one, other, compared) in enumerate(zip(keys, *rows, comparable.tolist())):
        shapes = compared and layouts[0].table.shape[one] == layouts[1].table.shape[other]
        repeats = compared and measured[0][i] != one and measured[1][i] != other and errors[i] == 0
        first = layouts[0].keys[measured[0][i]] if repeats else None
        records.append(
            MergedRecord(
                key=key,
                rows=(None if one < 0 else one, None if other < 0 else other),
                numbers=[None if measured[side][i] < 0 else numbers[side][i] for side in (0, 1)],
                differences=differences[i] if compared else None,
                error=errors[i] if shapes else None,
                same_as=f"{_module_of(first)} {_tensor_of(first)}" if first else "",
            )
        )
    return records


def _numbers(table: Table, rows: np.ndarray) -> list[tuple]:
    return list(zip(*(getattr(table, name)[rows].tolist() for name in COLUMNS)))


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return differences relative to the larger number: 0 for equal numbers, inf if only one is NaN or infinite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(ratio), ratio, np.inf))
