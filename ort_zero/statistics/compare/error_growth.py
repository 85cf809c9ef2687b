"""How far the parameters of two runs are apart as a step begins, also where only samples of them were measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import Pairs, inverse
from ort_zero.statistics.compare.dataflow import Lineage
from ort_zero.statistics.compare.distance import NO_NUMBER, SAME, Distances, unsampled
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.records import Phase

UNKNOWN_DRIFT = 1e-2
"""Error of parameters at later steps where they were not collected, or not the same samples of them."""
UNSEEN = 4.0
"""Adam turns a gradient that is nothing but noise into a whole step. Where gradients agree to a fraction x, about that
share of the elements does so: the changes of a parameter then differ by about sqrt(x) of their size, in so few elements
that a sample may have none of them. So many times that is assumed."""


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The parameters and gradients of a step, kept for the next one."""

    step: int
    sketch_a: np.ndarray
    """Of the pairs that are parameters."""
    sketch_b: np.ndarray
    gradient_errors: np.ndarray
    """Of the same pairs; the median where there is no gradient."""
    gradient_error: float
    """Median over gradients; NaN if there are none."""
    unseen: np.ndarray
    """What may have come apart outside the samples, as norms."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """How far the parameters of two runs are apart as a step begins."""

    total: float
    """Of all parameters together."""
    frame: np.ndarray
    """For each frame: what its own parameters bring, at least the total (tied parameters have one owner alone)."""
    unseen: np.ndarray
    """See :class:`Before`."""


def remember(step: int, pairs: Pairs, found: Distances, a: Table, b: Table, unseen: np.ndarray) -> Before:
    """Return what the next step needs of this one."""
    rows = parameters_of(pairs)
    gradients = np.flatnonzero((pairs.phase == Phase.PARAMETER_GRADIENT) & (found.kind != SAME))
    errors = {pairs.a.keys[pairs.row_a[i]][1:]: found.error[i] for i in gradients.tolist()}
    if not len(gradients):
        gradients = np.flatnonzero((pairs.phase == Phase.BACKWARD) & (found.kind != SAME))
    median = float(np.median(found.error[gradients])) if len(gradients) else np.nan
    keys = [pairs.a.keys[row][1:] for row in pairs.row_a[rows].tolist()]
    return Before(
        step=step,
        sketch_a=a.sketch[pairs.measured_a[rows]],
        sketch_b=b.sketch[pairs.measured_b[rows]],
        gradient_errors=np.array([errors.get(key, median) for key in keys]),
        gradient_error=median,
        unseen=unseen,
    )


def parameters_of(pairs: Pairs) -> np.ndarray:
    """Return the pairs that are parameters."""
    return np.flatnonzero(pairs.phase == Phase.PARAMETER)


def drift_of(lineage: Lineage, found: Distances, a: Table, b: Table, before: Before | None) -> Drift:
    """Return how far the parameters are apart.

    A parameter's error counts as much as its norm has among those of its module: a bias near 0 has a large relative
    error and next to no effect.

    Args:
        lineage: who inherits from whom.
        found: the errors of all pairs.
        a: numbers of the first run.
        b: numbers of the second run.
        before: the step before; None at the first.
    """
    pairs = lineage.pairs
    rows = parameters_of(pairs)
    if not len(rows):
        unknown = UNKNOWN_DRIFT if a.step else 0.0
        return Drift(unknown, np.full(lineage.frames, unknown), np.zeros(0))
    scale = unsampled(pairs, a)[rows]
    norm = np.maximum(a.l2[pairs.row_a[rows]], b.l2[pairs.row_b[rows]]) * scale
    unseen = _unseen(pairs, rows, scale, a, before)
    error = np.where(found.kind[rows] == SAME, UNKNOWN_DRIFT if a.step else 0.0, found.error[rows])
    gap = np.maximum(error * norm, unseen)
    whole = np.sqrt((norm**2).sum())
    total = float(np.sqrt((gap**2).sum()) / whole) if whole else 0.0
    absolute, largest = np.zeros(lineage.frames), np.zeros(lineage.frames)
    place = inverse(rows, len(pairs))[lineage.owned]
    at = place >= 0
    np.maximum.at(absolute, lineage.owner[at], gap[place[at]])
    np.maximum.at(largest, lineage.owner[at], norm[place[at]])
    own = np.divide(absolute, largest, out=np.zeros(lineage.frames), where=largest > 0)
    return Drift(total, np.maximum(np.minimum(own, NO_NUMBER), total), unseen)


def _unseen(pairs: Pairs, rows: np.ndarray, scale: np.ndarray, a: Table, before: Before | None) -> np.ndarray:
    if before is None or len(before.unseen) != len(rows):
        return np.zeros(len(rows))
    change = np.linalg.norm(a.sketch[pairs.measured_a[rows]] - before.sketch_a, axis=1) * scale
    apart = np.sqrt(np.nan_to_num(before.gradient_errors, nan=1.0))
    return before.unseen + np.where(scale > 1, UNSEEN * apart * change, 0.0)
