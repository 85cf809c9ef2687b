"""Compare the steps of one rank in two runs, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import (
    KIND_NAMES,
    NO_NUMBER,
    SAME,
    Distances,
    PairedTables,
    distances,
    layout_of,
    pair,
    same_layout,
)
from ort_zero.statistics.compare.comparison import ComparedRecord
from ort_zero.statistics.compare.dataflow import Dataflow, dataflow_of, inherited_errors
from ort_zero.statistics.compare.error_growth import ErrorGrowth, PreviousStep, error_growth, remember
from ort_zero.statistics.compare.tolerance import COMPOUND, EPSILON, Conditions, Limits, conditions_of, limits_of
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS

APART = 4 * EPSILON["float32"]
"""Minimum relative difference of parameters that differ; smaller differences come from summing sketches of ranks."""
VANISHING = 1e3
"""Condition from which a gradient is only rounding errors, such as of the bias of attention's keys: even a fixed
tolerance is then relative to the terms of the gradient's sum."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepComparison(PairedTables):
    """The comparison of one step of one rank in two runs: tables, errors and tolerances of all pairs."""

    rank: int
    distances: Distances
    growth: ErrorGrowth
    """The relative errors of the parameters at the beginning of the step."""
    inherited: np.ndarray
    """The largest error among the inputs of each pair's computation."""
    conditions: Conditions
    tolerance: np.ndarray
    """The largest error of each pair that rounding and the inherited error explain."""
    norm_tolerance: np.ndarray
    """The largest difference of norms of each pair that rounding and the inherited error explain."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.a.step

    @property
    def is_first(self) -> bool:
        """True if no optimizer step has changed the parameters yet."""
        return self.step == 0

    def with_tolerance(self, pairs: Any, tolerance: Any) -> StepComparison:
        """Return a copy in which `pairs`, an index of an array, have another tolerance."""
        changed = self.tolerance.copy()
        changed[pairs] = tolerance
        return dataclasses.replace(self, tolerance=changed)

    def without_sketches(self) -> StepComparison:
        """Return a copy without sketches, which take most of the memory."""
        empty = np.zeros((0, 0))
        a, b = (dataclasses.replace(table, sketch=empty) for table in (self.a, self.b))
        return dataclasses.replace(self, a=a, b=b)


class RankComparison:
    """The comparison of one rank in two runs, step by step in ascending order.

    With `other_dtype` the runs differ in dtype on purpose. For `rtol` see :func:`.compare_runs.compare`, None for auto.
    """

    def __init__(self, rank: int, other_dtype: bool, rtol: float | None):
        self.rank = rank
        self.previous: PreviousStep | None = None
        """The parameters and gradient errors of the previous step."""
        self._other_dtype, self._rtol = other_dtype, rtol
        self._structure: tuple[Dataflow, Limits] | None = None
        """What steps share as long as only their statistics differ."""

    def compare(self, a: Table, b: Table) -> StepComparison:
        """Compare one step of two runs, of which the first counts as correct."""
        dataflow, limits = self._structure_of(a, b)
        pairs = dataflow.pairs
        tables = PairedTables(pairs, a, b)
        step_distances = distances(tables)
        growth = error_growth(dataflow, tables, step_distances, self.previous)
        inherited = inherited_errors(dataflow, step_distances.error, step_distances.kind != SAME, growth.of_frames)
        if not (pairs.phase == Phase.FORWARD).any():  # ranks together: gradients have errors of parameters alone
            inherited = np.where(pairs.phase == Phase.PARAMETER_GRADIENT, COMPOUND * growth.total, inherited)
        conditions = conditions_of(dataflow, limits, tables, parameters_differ=growth.total > APART)
        if self._rtol is None:
            tolerance = conditions.tolerance(inherited)
        else:
            vanishing = (pairs.phase == Phase.PARAMETER_GRADIENT) & (conditions.condition > VANISHING)
            tolerance = self._rtol * np.where(vanishing, conditions.condition, 1.0)
        return StepComparison(
            pairs=pairs,
            a=a,
            b=b,
            rank=self.rank,
            distances=step_distances,
            growth=growth,
            inherited=inherited,
            conditions=conditions,
            tolerance=tolerance,
            norm_tolerance=conditions.norm_tolerance(inherited),
        )

    def remember(self, step: StepComparison) -> None:
        """Keep the parameters and gradient errors of a step for the next step."""
        self.previous = remember(step, step.distances, step.growth)

    def _structure_of(self, a: Table, b: Table) -> tuple[Dataflow, Limits]:
        if self._structure is not None:
            pairs = self._structure[0].pairs
            if same_layout(pairs.a.table, a) and same_layout(pairs.b.table, b):
                return self._structure
        dataflow = dataflow_of(pair(layout_of(a), layout_of(b)))
        self._structure = dataflow, limits_of(dataflow, self._other_dtype)
        return self._structure


def record_of(step: StepComparison, index: int) -> ComparedRecord:
    """Return the pair with the number `index`."""
    pairs, distances = step.pairs, step.distances
    table, row = pairs.a.table, int(pairs.row_a[index])
    error, tolerance = float(distances.error[index]), float(step.tolerance[index])
    return ComparedRecord(
        step=step.step,
        rank=step.rank,
        phase=Phase(int(table.phase[row])),
        order=int(table.order[row]),
        module=table.module[row],
        occurrence=int(table.occurrence[row]),
        tensor=tensor_name(table.kind[row], table.slot[row]),
        kind=KIND_NAMES[distances.kind[index]] if error > tolerance else "",
        error=float("nan") if error >= NO_NUMBER else error,
        tolerance=tolerance,
        inherited=float(step.inherited[index]),
        a=_side(step.a, row, int(pairs.measured_a[index])),
        b=_side(step.b, int(pairs.row_b[index]), int(pairs.measured_b[index])),
    )


def _side(table: Table, key: int, row: int) -> dict[str, Any]:
    """Return shape, dtype, statistics and first values of a record, whose statistics are in the row `row`."""
    numbers = {name: getattr(table, name)[row].item() for name in COLUMNS}
    first = table.first[row, : numbers["elements"]].tolist()
    return {"shape": list(table.shape[key]), "dtype": table.dtype[key], **numbers, "first": first}


class StepRecords(Sequence):
    """The compared records of one step and rank, in order of execution, made on demand: only a report needs them."""

    def __init__(self, step: StepComparison):
        self._step, self._numbers = step, np.flatnonzero(step.pairs.comparable)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return record_of(self._step, int(self._numbers[index]))
