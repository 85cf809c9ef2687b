"""What is known of one step of one rank in two runs, as one record that is handed on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import PairedTables, Pairs
from ort_zero.statistics.compare.distance import Distances
from ort_zero.statistics.compare.error_growth import ErrorGrowth
from ort_zero.statistics.compare.tolerance import Conditions
from ort_zero.statistics.file_format import Table


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepComparison:
    """One step of one rank in two runs: what was collected, how far it is apart, and how far it may be."""

    rank: int
    tables: PairedTables
    distances: Distances
    growth: ErrorGrowth
    """How far the parameters are apart as the step begins."""
    inherited: np.ndarray
    """The largest error among what each pair was computed from."""
    conditions: Conditions
    floor: np.ndarray
    """The error that each pair has of its own rounding errors."""
    tolerance: np.ndarray
    """The error of each pair that what it inherits explains."""
    norm_tolerance: np.ndarray
    """The difference of norms of each pair that what it inherits explains."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.tables.a.step

    @property
    def is_first(self) -> bool:
        """True if the parameters have not been trained apart yet."""
        return self.step == 0

    @property
    def pairs(self) -> Pairs:
        """The rows that both runs have."""
        return self.tables.pairs

    @property
    def a(self) -> Table:
        """The numbers of the first run."""
        return self.tables.a

    @property
    def b(self) -> Table:
        """The numbers of the second run."""
        return self.tables.b

    def tolerance_of_undiverged(self, parameter_error: float) -> np.ndarray:
        """Return the tolerance of two runs that have not diverged, whose parameters are apart by `parameter_error`."""
        return self.conditions.tolerance(self.floor, np.full(len(self.floor), parameter_error))

    def without_sketches(self) -> StepComparison:
        """Return the same without sketches, which are most of the memory."""
        empty = np.zeros((0, 0))
        a, b = (dataclasses.replace(table, sketch=empty) for table in (self.a, self.b))
        return dataclasses.replace(self, tables=dataclasses.replace(self.tables, a=a, b=b))
