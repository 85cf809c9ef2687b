"""How far the parameters of two runs are apart as a step begins, also where only samples of them were measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import PairedTables, Pairs, inverse
from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.compare.distance import NO_NUMBER, SAME, Distances
from ort_zero.statistics.records import Phase

UNKNOWN_ERROR = 1e-2
"""Error of parameters at later steps where they were not collected, or not the same samples of them."""
UNSEEN = 4.0
"""Factor on sqrt(x) in the relative error that is assumed of the changes of parameters outside of the samples, where
gradients agree to a fraction x. Adam turns a gradient that is nothing but noise into a whole step, and about the
share x of the elements has such a gradient: the changes of a parameter then differ by about sqrt(x) of their size,
in so few elements that a sample may have none of them."""


@dataclass(frozen=True, slots=True, eq=False)
class PreviousStep:
    """The parameters and gradients of a step, kept for the next one."""

    step: int
    sketch_a: np.ndarray
    """Sketches of the pairs that are parameters in the first run, float64 [pairs, SKETCH]."""
    sketch_b: np.ndarray
    gradient_errors: np.ndarray
    """Relative error of the gradient of each of these pairs; the median where there is no gradient."""
    gradient_error: float
    """Median of the gradients' relative errors; NaN if there are no gradients."""
    unseen: np.ndarray
    """Norms of the differences that may have come about outside of the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class ErrorGrowth:
    """How far the parameters of two runs are apart as a step begins, as relative errors."""

    total: float
    """Relative error of all parameters together."""
    of_frames: np.ndarray
    """Relative error that each frame's own parameters bring, at least the total (tied parameters have one owner
    alone)."""
    unseen: np.ndarray
    """Norms of differences outside of the samples, see :class:`PreviousStep`."""


def remember(tables: PairedTables, found: Distances, growth: ErrorGrowth) -> PreviousStep:
    """Return what the next step needs of this one."""
    pairs = tables.pairs
    rows = parameters_of(pairs)
    gradients = np.flatnonzero((pairs.phase == Phase.PARAMETER_GRADIENT) & (found.kind != SAME))
    errors = {pairs.a.keys[pairs.row_a[i]][1:]: found.error[i] for i in gradients.tolist()}
    if not len(gradients):
        gradients = np.flatnonzero((pairs.phase == Phase.BACKWARD) & (found.kind != SAME))
    median = float(np.median(found.error[gradients])) if len(gradients) else np.nan
    keys = [pairs.a.keys[row][1:] for row in pairs.row_a[rows].tolist()]
    return PreviousStep(
        step=tables.a.step,
        sketch_a=tables.a.sketch[pairs.measured_a[rows]],
        sketch_b=tables.b.sketch[pairs.measured_b[rows]],
        gradient_errors=np.array([errors.get(key, median) for key in keys]),
        gradient_error=median,
        unseen=growth.unseen,
    )


def parameters_of(pairs: Pairs) -> np.ndarray:
    """Return the pairs that are parameters."""
    return np.flatnonzero(pairs.phase == Phase.PARAMETER)


def error_growth(
    dataflow: Dataflow, tables: PairedTables, found: Distances, previous: PreviousStep | None
) -> ErrorGrowth:
    """Return how far the parameters are apart.

    A parameter's error counts as much as its norm has among those of its module: a bias near 0 has a large relative
    error and next to no effect.

    Args:
        dataflow: which frames use which parameters.
        tables: the numbers of both runs.
        found: the errors of all pairs.
        previous: the step before; None at the first.
    """
    pairs, unknown = tables.pairs, UNKNOWN_ERROR if tables.a.step else 0.0
    rows = parameters_of(pairs)
    if not len(rows):
        return ErrorGrowth(unknown, np.full(dataflow.frames, unknown), np.zeros(0))
    scale = tables.unsampled()[rows]
    norm = np.maximum(tables.a.l2[pairs.row_a[rows]], tables.b.l2[pairs.row_b[rows]]) * scale
    unseen = _unseen(tables, rows, scale, previous)
    error = np.where(found.kind[rows] == SAME, unknown, found.error[rows])
    gap = np.maximum(error * norm, unseen)
    whole = np.sqrt((norm**2).sum())
    total = float(np.sqrt((gap**2).sum()) / whole) if whole else 0.0
    absolute, largest = np.zeros(dataflow.frames), np.zeros(dataflow.frames)
    parameter = inverse(rows, len(pairs))[dataflow.owners.pair]
    at = parameter >= 0
    np.maximum.at(absolute, dataflow.owners.frame[at], gap[parameter[at]])
    np.maximum.at(largest, dataflow.owners.frame[at], norm[parameter[at]])
    own = np.divide(absolute, largest, out=np.zeros(dataflow.frames), where=largest > 0)
    return ErrorGrowth(total, np.maximum(np.minimum(own, NO_NUMBER), total), unseen)


def _unseen(tables: PairedTables, rows: np.ndarray, scale: np.ndarray, previous: PreviousStep | None) -> np.ndarray:
    if previous is None or len(previous.unseen) != len(rows):
        return np.zeros(len(rows))
    sketch = tables.a.sketch[tables.pairs.measured_a[rows]]
    change = np.linalg.norm(sketch - previous.sketch_a, axis=1) * scale
    apart = np.sqrt(np.nan_to_num(previous.gradient_errors, nan=1.0))
    return previous.unseen + np.where(scale > 1, UNSEEN * apart * change, 0.0)
