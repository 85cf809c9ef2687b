"""Collect the rows of one step in memory until they are written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ort_zero.statistics.file_format import DESCRIPTION
from ort_zero.statistics.rows import WIDTH


class CollectedStep:
    """The statistics of one step of one rank, collected row by row."""

    def __init__(self, number: int, rows: int = 128):
        self.number = number
        self.columns: list[tuple] = []
        """The columns of each row except the statistics, in the order of ``DESCRIPTION``."""
        self.raw = np.zeros((rows, WIDTH))
        self.used = 0
        self.sources: list[tuple[int, int]] = []
        """Pairs (row that refers to an earlier row, order of the earlier row)."""
        self.by_order: dict[int, int] = {}
        self.with_gradient: set[tuple[int, int]] = set()
        self.awaits_gradients = False

    def add(self, *described: Any) -> np.ndarray:
        """Add a row, and return its place for the statistics, filled with zeros.

        Args:
            described: the columns in ``DESCRIPTION``, the dtype as torch's object.
        """
        self.columns.append(described)
        if self.used == len(self.raw):
            self.raw = np.concatenate([self.raw, np.zeros_like(self.raw)])
        self.used += 1
        return self.raw[self.used - 1]

    def finished(self) -> tuple[dict[str, list], np.ndarray]:
        """Return the columns that describe the rows, and the statistics, as the arguments of ``encode_step``.

        A row that refers to an earlier row gets the shape and dtype of the earlier row.
        """
        described: dict[str, list] = {name: [] for name in DESCRIPTION}
        described.update(zip(DESCRIPTION, map(list, zip(*self.columns, strict=True))))
        shapes, dtypes = described["shape"], described["dtype"]
        for row, order in self.sources:
            first = self.by_order.get(order)
            if first is not None:
                shapes[row], dtypes[row] = shapes[first], dtypes[first]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(dtypes)}
        described["dtype"] = [names[dtype] for dtype in dtypes]
        return described, self.raw[: self.used]
