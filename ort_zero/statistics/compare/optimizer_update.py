"""Detect that two runs differ in the optimizer: parameters changed differently although the gradients agree."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.compared_records import record_of
from ort_zero.statistics.compare.comparison import FirstDivergence
from ort_zero.statistics.compare.distance import SAME
from ort_zero.statistics.compare.error_growth import PreviousStep, parameters_of
from ort_zero.statistics.compare.first_divergence import full_name
from ort_zero.statistics.compare.rank_comparison import StepComparison
from ort_zero.statistics.compare.tolerance import epsilons

MIN_SHARE = 0.5
"""Share of the parameters; the runs differ in the optimizer if a larger share changed differently."""
UPDATE_GAP = 0.03
"""Minimum relative difference of two updates that differ; :data:`UPDATE_SPREAD` raises it if the gradients differ."""
UPDATE_SPREAD = 30.0
"""Factor on sqrt(x) in the relative difference that two updates may have if the gradients' relative error is x; see
:data:`~.error_growth.UNSEEN`."""
GRADIENTS_AGREE = 1e3
"""Maximum median error of gradients that agree, in epsilons of the dtype."""


def find_update_divergence(previous: PreviousStep | None, step: StepComparison) -> tuple[FirstDivergence, int] | None:
    """Return the first divergence and its pair if most parameters changed differently and the gradients agreed.

    Args:
        previous: the previous step of the rank; None for the first step.
        step: the comparison of one step of a rank.
    """
    pairs, a, b = step.pairs, step.a, step.b
    rows = parameters_of(pairs)
    if previous is None or previous.step + 1 != step.step or len(previous.sketch_a) != len(rows):
        return None
    epsilon = np.maximum(
        epsilons(pairs.a.table.dtype)[pairs.row_a[rows]], epsilons(pairs.b.table.dtype)[pairs.row_b[rows]]
    )
    if not len(rows) or not previous.gradient_error <= GRADIENTS_AGREE * float(np.median(epsilon)):
        return None
    change_a = a.sketch[pairs.measured_a[rows]] - previous.sketch_a
    change_b = b.sketch[pairs.measured_b[rows]] - previous.sketch_b
    size = np.maximum(np.linalg.norm(change_a, axis=1), np.linalg.norm(change_b, axis=1))
    moved = (size > 0) & (step.distances.kind[rows] != SAME)
    if not moved.any():
        return None
    gap = np.linalg.norm(change_a - change_b, axis=1)[moved] / size[moved]
    norm = np.maximum(a.l2[pairs.measured_a[rows]], b.l2[pairs.measured_b[rows]])[moved]
    limit = max(UPDATE_GAP, UPDATE_SPREAD * float(np.sqrt(previous.gradient_error))) + 8 * (
        epsilon[moved] * norm / size[moved]
    )
    # the error that the update may leave, relative to the parameter as all errors are
    tolerance = np.divide(limit * size[moved], norm, out=np.zeros(len(norm)), where=norm > 0)
    apart = np.flatnonzero((gap > limit) & (step.distances.error[rows][moved] > tolerance))
    if len(apart) <= MIN_SHARE * len(gap):
        return None
    number = int(rows[moved][apart[0]])
    difference = record_of(step.with_tolerance(number, tolerance[apart[0]]), number)
    text = (
        f"step {step.step}, rank {step.rank}, update: {len(apart)} of {len(gap)} parameters changed "
        f"differently from step {previous.step} to {step.step} (median difference of the changes "
        f"{np.median(gap):.1e}, {full_name(difference)} first) although the gradients agree to "
        f"{previous.gradient_error:.1e}: compare learning rate, weight decay, clipping and averaging over ranks"
    )
    module = difference.module
    return FirstDivergence(same=False, module=module, direction="update", difference=difference, text=text), number
