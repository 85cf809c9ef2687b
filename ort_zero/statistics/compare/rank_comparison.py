"""Compare the steps of one rank in two runs, one after the other."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.align import layout_of, pair, same_layout
from ort_zero.statistics.compare.dataflow import Dataflow, dataflow_of, inherited_errors
from ort_zero.statistics.compare.error_growth import estimate_parameter_errors
from ort_zero.statistics.compare.step import SAME, StepComparison
from ort_zero.statistics.compare.tolerance import COMPOUND, EPSILON, Conditions
from ort_zero.statistics.records import Phase, Table

APART = 4 * EPSILON["float32"]
"""Minimum relative difference of parameters that differ; smaller differences come from summing sketches of ranks."""
VANISHING = 1e3
"""Condition from which a gradient is only rounding errors, such as of the bias of attention's keys: even a fixed
tolerance is then relative to the terms of the gradient's sum."""


class RankComparison:
    """The comparison of one rank in two runs, step by step in ascending order.

    With `other_dtype` the runs differ in dtype on purpose. For `rtol` see :func:`.compare_runs.compare`, None for auto.
    """

    def __init__(self, rank: int, other_dtype: bool, rtol: float | None):
        self.rank = rank
        self.previous: StepComparison | None = None
        """The comparison of the step before, with its sketches; the caller sets it."""
        self._other_dtype, self._rtol = other_dtype, rtol
        self._dataflow: Dataflow | None = None
        """What steps share as long as only their statistics differ."""

    def compare(self, a: Table, b: Table) -> StepComparison:
        """Compare one step of two runs, of which the first counts as correct."""
        dataflow = self._dataflow_of(a, b)
        step = StepComparison(self.rank, dataflow.pairs, a, b)
        step.measure()
        in_frames = estimate_parameter_errors(step, dataflow, self.previous)
        phase = step.pairs.phase
        step.inherited = inherited_errors(dataflow, step.error, step.difference != SAME, in_frames)
        gradients = phase == Phase.PARAMETER_GRADIENT
        if not (phase == Phase.FORWARD).any():  # ranks together: gradients have errors of parameters alone
            step.inherited = np.where(gradients, COMPOUND * step.parameter_error, step.inherited)
        conditions = Conditions(step, dataflow, self._other_dtype, parameters_differ=step.parameter_error > APART)
        step.tolerance_for = conditions.tolerance
        step.norm_tolerance = conditions.norm_tolerance(step.inherited)
        if self._rtol is None:
            step.tolerance = conditions.tolerance(step.inherited)
        else:
            vanishing = gradients & (conditions.condition > VANISHING)
            step.tolerance = self._rtol * np.where(vanishing, conditions.condition, 1.0)
        return step

    def _dataflow_of(self, a: Table, b: Table) -> Dataflow:
        pairs = self._dataflow.pairs if self._dataflow is not None else None
        if pairs is None or not same_layout(pairs.a.layout.table, a) or not same_layout(pairs.b.layout.table, b):
            self._dataflow = dataflow_of(pair(layout_of(a), layout_of(b)))
        assert self._dataflow is not None
        return self._dataflow
