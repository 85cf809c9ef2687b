"""Collect the rows of one step in memory until they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ort_zero.statistics.file_format import StepRows
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import WIDTH

_COLUMNS = (
    "phase", "order", "call", "caller", "occurrence", "source", "module", "kind", "slot", "dtype", "shape",
    "partitioned",
)  # fmt: skip


class CollectedStep:
    """The statistics of one step of one rank, collected row by row."""

    def __init__(self, number: int, rows: int = 128):
        self.number = number
        self.columns: list[tuple] = []
        """The columns of each row except the statistics, in the order of :data:`_COLUMNS`."""
        self.raw = np.zeros((rows, WIDTH))
        self.used = 0
        self.sources: list[tuple[int, int]] = []
        """Pairs (row that refers to an earlier row, order of the earlier row)."""
        self.by_order: dict[int, int] = {}
        self.with_gradient: set[tuple[int, int]] = set()
        self.awaits_gradients = False

    def next_row(self) -> np.ndarray:
        """Return the next row of statistics, filled with zeros."""
        if self.used == len(self.raw):
            self.raw = np.concatenate([self.raw, np.zeros_like(self.raw)])
        self.used += 1
        return self.raw[self.used - 1]

    def describe(
        self, phase: Phase, order: int, call: int, caller: int, occurrence: int, source: int, module: str, kind: str,
        slot: str, tensor: torch.Tensor, shape: Any = None, partitioned: bool = False,
    ) -> None:  # fmt: skip
        """Add all columns except the statistics to the row that :meth:`next_row` returned last."""
        # one append instead of twelve: a step has some hundred rows
        self.columns.append(
            (phase, order, call, caller, occurrence, source, module, kind, slot, tensor.dtype,
             tensor.shape if shape is None else shape, partitioned)
        )  # fmt: skip

    def finished(self) -> StepRows:
        """Return the rows; a row that refers to an earlier row gets the shape and dtype of the earlier row."""
        columns = {name: list(values) for name, values in zip(_COLUMNS, zip(*self.columns, strict=True), strict=True)}
        rows = StepRows(**columns, raw=self.raw[: self.used]) if columns else StepRows()
        for row, order in self.sources:
            first = self.by_order.get(order)
            if first is not None:
                rows.shape[row], rows.dtype[row] = rows.shape[first], rows.dtype[first]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(rows.dtype)}
        rows.dtype = [names[dtype] for dtype in rows.dtype]
        return rows
