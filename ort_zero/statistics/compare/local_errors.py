"""Find the records of a step with a local error: an error that the errors of the record's inputs do not explain."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.distance import NUMERIC
from ort_zero.statistics.compare.layout import OUTPUT, CallTree
from ort_zero.statistics.compare.rank_comparison import StepComparison
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import SKETCH

ISOLATED = 8
"""Maximum number of a sketch's numbers that single elements with an error may change."""
INHERITED_TIMES = 8.0
"""Factor for a fixed tolerance: an error that is larger than the inherited error times this factor is local."""
VANISHED = 1e-6
"""Root mean square below which activations are rounding errors: batch normalization of almost constant channels returns
such values."""
REORDERED = 0.3
"""Minimum relative error of tensors that are compared as the same values in another order."""
REORDERED_VALUES = 1e-4
"""Maximum relative difference of norm, means and extremes of the same values in another order."""
REORDERED_RESULTS = 1e-4
"""Maximum error of the outputs of an enclosing module for which the order of values inside does not matter."""


def pairs_with_local_error(step: StepComparison, rtol: float | None) -> np.ndarray:
    """Return the numbers of the pairs with a local error, in order of execution.

    Args:
        step: the comparison of one step of a rank.
        rtol: the user's fixed tolerance; None: errors that rounding does not explain.
    """
    error, inherited = step.distances.error, step.inherited
    # the optimizer amplifies noise: single parameters may be far apart in correct runs
    may_differ = (step.pairs.phase != Phase.PARAMETER) | step.is_first
    if rtol is not None:
        over = step.pairs.new_value & (error > step.tolerance) & may_differ
        local = over & ((inherited <= rtol) | (error > INHERITED_TIMES * inherited))
        return np.flatnonzero(local if local.any() else over)
    over = step.pairs.new_value & ((error > step.tolerance) | (step.distances.norm > step.norm_tolerance))
    over &= may_differ
    if not step.is_first:
        over &= ~_vanished(step)
    gradients = np.flatnonzero(over & (step.pairs.phase == Phase.BACKWARD))
    over[gradients[_isolated(step, gradients)]] = False
    over &= ~_only_reordered(step, over)
    return np.flatnonzero(over)


def _vanished(step: StepComparison) -> np.ndarray:
    """Return True for activations that are close to 0 in both runs."""
    pairs, a, b = step.pairs, step.a, step.b
    rows_a, rows_b = pairs.measured_a, pairs.measured_b
    size = np.maximum(a.l2[rows_a], b.l2[rows_b]) / np.sqrt(np.maximum(a.elements[rows_a], 1))
    return (pairs.phase == Phase.FORWARD) & (step.distances.kind == NUMERIC) & (size < VANISHED)


def _only_reordered(step: StepComparison, over: np.ndarray) -> np.ndarray:
    """Return True for equal values in another order inside of a module whose outputs agree.

    Experts take their tokens in the order of a sort. Sorts order equal keys differently, and the experts' outputs are
    put back into the old order.
    """
    pairs, a, b = step.pairs, step.a, step.b
    reordered = np.zeros(len(pairs), bool)
    moved = (step.distances.error >= REORDERED) & (step.distances.kind == NUMERIC)
    numbers = np.flatnonzero(over & moved & ((pairs.phase == Phase.FORWARD) | (pairs.phase == Phase.BACKWARD)))
    if not len(numbers):
        return reordered
    table = pairs.a.table
    outputs = np.flatnonzero((pairs.phase == Phase.FORWARD) & (pairs.a.kind[pairs.row_a] == OUTPUT))
    worst: dict[int, float] = {}
    for number in outputs.tolist():
        call = int(table.call[pairs.row_a[number]])
        worst[call] = max(worst.get(call, 0.0), float(step.distances.error[number]))
    calls = CallTree(pairs.a)
    for number in numbers.tolist():
        row_a, row_b = int(pairs.measured_a[number]), int(pairs.measured_b[number])
        if row_a < 0 or row_b < 0 or not _same_values(a, row_a, b, row_b):
            continue
        around = calls.chain(int(table.call[pairs.row_a[number]]))[1:]
        reordered[number] = any(worst.get(call, 1.0) < REORDERED_RESULTS for call in around)
    return reordered


def _same_values(a: Table, row_a: int, b: Table, row_b: int) -> bool:
    """Return True if the statistics of two tensors fit to the same values in another order."""
    if a.elements[row_a] != b.elements[row_b]:
        return False
    size = max(float(a.l2[row_a]), float(b.l2[row_b]))
    spread = size / max(float(a.elements[row_a]), 1.0) ** 0.5
    return all(
        abs(float(getattr(a, name)[row_a]) - float(getattr(b, name)[row_b])) <= REORDERED_VALUES * scale
        for name, scale in (("l2", size), ("abs_mean", spread), ("mean", spread), ("min", spread), ("max", spread))
    )


def _isolated(step: StepComparison, numbers: np.ndarray) -> np.ndarray:
    """Return True for gradients that differ only in a few elements, if their inputs have rounding errors.

    The derivative of ReLU or of a maximum jumps: a rounding error of an input near 0 sets an element of the gradient to
    0, or back. A few elements change only a few numbers of the sketch.
    """
    pairs, a, b = step.pairs, step.a, step.b
    rows_a, rows_b = pairs.measured_a[numbers], pairs.measured_b[numbers]
    gaps = np.sort(np.abs(a.sketch[rows_a] - b.sketch[rows_b]), axis=1)[:, :-ISOLATED]
    norm = np.maximum(np.maximum(a.l2[rows_a], b.l2[rows_b]), np.finfo(float).tiny)
    rest = np.linalg.norm(gaps, axis=1) / norm
    noisy = step.inherited[numbers] > 0
    numeric = step.distances.kind[numbers] == NUMERIC
    return noisy & numeric & (rest <= step.tolerance[numbers]) & (a.elements[rows_a] >= ISOLATED * SKETCH)
