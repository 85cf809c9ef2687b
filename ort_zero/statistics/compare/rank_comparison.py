"""Compare the steps of one rank in two runs, one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import PairedTables, Pairs, pair
from ort_zero.statistics.compare.conditions import COMPOUND, conditions_of
from ort_zero.statistics.compare.dataflow import Dataflow, dataflow_of, inherited_errors
from ort_zero.statistics.compare.distance import SAME, Distances, distances
from ort_zero.statistics.compare.error_growth import ErrorGrowth, PreviousStep, error_growth, remember
from ort_zero.statistics.compare.layout import Layout, layout_of, same_layout
from ort_zero.statistics.compare.tolerance import EPSILON, REFERENCE, Conditions, Limits, floor_of, limits_of
from ort_zero.statistics.records import Phase, Table

APART = 4 * EPSILON["float32"]
"""Minimum relative difference of parameters that differ; smaller differences come from summing sketches of ranks."""
VANISHING = 1e3
"""Condition from which a gradient is only rounding errors, such as of the bias of attention's keys: even a fixed
tolerance is then relative to the terms of the gradient's sum."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """The structure that steps share as long as only their statistics differ."""

    pairs: Pairs
    dataflow: Dataflow
    limits: Limits


class RankComparison:
    """The comparison of one rank in two runs, step by step in ascending order.

    Args:
        rank: number of the rank.
        other_dtype: the runs differ in dtype on purpose.
        rtol: relative error from which a record differs; None: errors that rounding does not explain.
    """

    def __init__(self, rank: int, other_dtype: bool, rtol: float | None):
        self.rank = rank
        self.previous: PreviousStep | None = None
        """The parameters and gradient errors of the previous step."""
        self._other_dtype, self._rtol = other_dtype, rtol
        self._layouts: list[Layout | None] = [None] * 3
        """The layout of the last table of each run and of the reference."""
        self._structure: _Structure | None = None
        self._reference_pairs: Pairs | None = None
        self._widest: np.ndarray | None = None

    def compare(self, a: Table, b: Table, reference: Table | None = None) -> StepComparison:
        """Compare one step of two runs.

        Args:
            a: the step in the correct run.
            b: the step in the run to check.
            reference: the step in a repetition of the correct run; None without a reference.
        """
        structure = self._structure_of(a, b)
        pairs, dataflow = structure.pairs, structure.dataflow
        tables = PairedTables(pairs, a, b)
        step_distances = distances(tables)
        noise = REFERENCE * (spread := self._spread(pairs, a, reference))
        growth = error_growth(dataflow, tables, step_distances, self.previous)
        errors = np.maximum(step_distances.error, spread)
        inherited = inherited_errors(dataflow, errors, step_distances.kind != SAME, growth.of_frames)
        if not (pairs.phase == Phase.FORWARD).any():  # ranks together: gradients have errors of parameters alone
            inherited = np.where(pairs.phase == Phase.PARAMETER_GRADIENT, COMPOUND * growth.total, inherited)
        conditions = conditions_of(dataflow, structure.limits, tables, parameters_differ=growth.total > APART)
        floor = np.maximum(floor_of(structure.limits), noise)
        tolerance = np.maximum(conditions.tolerance(floor, inherited), noise)
        return StepComparison(
            rank=self.rank,
            tables=tables,
            distances=step_distances,
            growth=growth,
            inherited=inherited,
            conditions=conditions,
            floor=floor,
            tolerance=tolerance if self._rtol is None else _fixed_tolerance(self._rtol, pairs, conditions),
            norm_tolerance=np.maximum(conditions.norm_tolerance(inherited), noise),
        )

    def remember(self, step: StepComparison) -> None:
        """Keep the parameters and gradient errors of a step for the next step."""
        self.previous = remember(step.tables, step.distances, step.growth)

    def _changed(self, run: int, table: Table) -> bool:
        """Keep the layout of the next table of a run, and return True if it differs from the run's last layout."""
        layout = self._layouts[run]
        if layout is not None and same_layout(layout.table, table):
            return False
        self._layouts[run] = layout_of(table)
        return True

    def _pair(self, one: int, other: int) -> Pairs:
        a, b = self._layouts[one], self._layouts[other]
        assert a is not None and b is not None
        return pair(a, b)

    def _structure_of(self, a: Table, b: Table) -> _Structure:
        changed = [self._changed(run, table) for run, table in enumerate((a, b))]
        if any(changed) or self._structure is None:
            pairs = self._pair(0, 1)
            dataflow = dataflow_of(pairs)
            self._structure = _Structure(pairs, dataflow, limits_of(dataflow, self._other_dtype))
            self._reference_pairs = self._widest = None
        return self._structure

    def _spread(self, pairs: Pairs, a: Table, reference: Table | None) -> np.ndarray:
        """Return the error of each pair of run `a` and its reference; the largest so far if the step is missing."""
        widest = self._widest if self._widest is not None else np.zeros(len(pairs))
        if reference is None:
            return widest
        if self._changed(2, reference) or self._reference_pairs is None:
            self._reference_pairs = self._pair(0, 2)
        of_row = np.zeros(len(a.phase))
        of_row[self._reference_pairs.row_a] = distances(PairedTables(self._reference_pairs, a, reference)).error
        spread = of_row[pairs.row_a]
        self._widest = np.maximum(widest, spread)
        return spread


def _fixed_tolerance(rtol: float, pairs: Pairs, conditions: Conditions) -> np.ndarray:
    vanishing = (pairs.phase == Phase.PARAMETER_GRADIENT) & (conditions.condition > VANISHING)
    return rtol * np.where(vanishing, conditions.condition, 1.0)
