"""Define the comparison of one step of one rank in two runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import PairedTables, Pairs
from ort_zero.statistics.compare.distance import Distances
from ort_zero.statistics.compare.error_growth import ErrorGrowth
from ort_zero.statistics.compare.tolerance import Conditions
from ort_zero.statistics.file_format import Table


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepComparison:
    """The comparison of one step of one rank in two runs: tables, errors and tolerances of all pairs."""

    rank: int
    tables: PairedTables
    distances: Distances
    growth: ErrorGrowth
    """The relative errors of the parameters at the beginning of the step."""
    inherited: np.ndarray
    """The largest error among the inputs of each pair's computation."""
    conditions: Conditions
    floor: np.ndarray
    """The rounding error of each pair without inherited errors."""
    tolerance: np.ndarray
    """The largest error of each pair that rounding and the inherited error explain."""
    norm_tolerance: np.ndarray
    """The largest difference of norms of each pair that rounding and the inherited error explain."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.tables.a.step

    @property
    def is_first(self) -> bool:
        """True if no optimizer step has changed the parameters yet."""
        return self.step == 0

    @property
    def pairs(self) -> Pairs:
        """The pairs of rows of both runs."""
        return self.tables.pairs

    @property
    def a(self) -> Table:
        """The table of the first run."""
        return self.tables.a

    @property
    def b(self) -> Table:
        """The table of the second run."""
        return self.tables.b

    def tolerance_of_undiverged(self, parameter_error: float) -> np.ndarray:
        """Return the tolerance of each pair if the parameters' relative error `parameter_error` were the only error."""
        return self.conditions.tolerance(self.floor, np.full(len(self.floor), parameter_error))

    def with_tolerance(self, pairs: Any, tolerance: Any) -> StepComparison:
        """Return a copy in which `pairs`, an index of an array, have another tolerance."""
        changed = self.tolerance.copy()
        changed[pairs] = tolerance
        return dataclasses.replace(self, tolerance=changed)

    def without_sketches(self) -> StepComparison:
        """Return a copy without sketches, which take most of the memory."""
        empty = np.zeros((0, 0))
        a, b = (dataclasses.replace(table, sketch=empty) for table in (self.a, self.b))
        return dataclasses.replace(self, tables=dataclasses.replace(self.tables, a=a, b=b))
