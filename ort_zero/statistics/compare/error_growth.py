"""Estimate the error of the parameters of two runs at the beginning of a step, also from samples of the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import NO_NUMBER, SAME, Distances, PairedTables, Pairs, inverse
from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.records import Phase

UNKNOWN_ERROR = 1e-2
"""Error of parameters after step 0 if they were not collected, or were sampled differently."""
UNSEEN = 4.0
"""Factor on sqrt(x) in the assumed relative error of the changes of parameter elements outside of the samples, if the
gradients' relative error is x. Adam turns a gradient element that is only noise into a whole step. About the share x
of the elements has such a gradient: the changes of a parameter then differ by about sqrt(x) of their size, in so few
elements that a sample may contain none."""


@dataclass(frozen=True, slots=True, eq=False)
class PreviousStep:
    """The parameters and gradient errors of a step, kept for the next step."""

    step: int
    sketch_a: np.ndarray
    """Sketches of the pairs that are parameters in the first run, float64 [pairs, SKETCH]."""
    sketch_b: np.ndarray
    gradient_errors: np.ndarray
    """Relative error of the gradient of each of these pairs; the median for parameters without a gradient."""
    gradient_error: float
    """Median of the gradients' relative errors; NaN if there are no gradients."""
    unseen: np.ndarray
    """Estimated norms of the differences of the parameters outside of the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class ErrorGrowth:
    """The relative errors of the parameters of two runs at the beginning of a step."""

    total: float
    """Relative error of all parameters together."""
    of_frames: np.ndarray
    """Relative error of each frame's parameters, at least the total: only one module owns tied parameters."""
    unseen: np.ndarray
    """Estimated norms of differences outside of the samples, see :class:`PreviousStep`."""


def remember(tables: PairedTables, distances: Distances, growth: ErrorGrowth) -> PreviousStep:
    """Return the parameters and gradient errors of a step, for the comparison of the next step."""
    pairs = tables.pairs
    rows = parameters_of(pairs)
    gradients = np.flatnonzero((pairs.phase == Phase.PARAMETER_GRADIENT) & (distances.kind != SAME))
    errors = {pairs.a.keys[pairs.row_a[i]][1:]: distances.error[i] for i in gradients.tolist()}
    if not len(gradients):
        gradients = np.flatnonzero((pairs.phase == Phase.BACKWARD) & (distances.kind != SAME))
    median = float(np.median(distances.error[gradients])) if len(gradients) else np.nan
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
    dataflow: Dataflow, tables: PairedTables, distances: Distances, previous: PreviousStep | None
) -> ErrorGrowth:
    """Estimate the relative errors of the parameters at the beginning of a step.

    The error of a frame is relative to the frame's largest parameter norm: a bias near 0 has a large relative error
    and almost no effect.
    """
    pairs, unknown = tables.pairs, UNKNOWN_ERROR if tables.a.step else 0.0
    rows = parameters_of(pairs)
    if not len(rows):
        return ErrorGrowth(unknown, np.full(dataflow.frames, unknown), np.zeros(0))
    scale = tables.unsampled()[rows]
    norm = np.maximum(tables.a.l2[pairs.row_a[rows]], tables.b.l2[pairs.row_b[rows]]) * scale
    unseen = _unseen(tables, rows, scale, previous)
    error = np.where(distances.kind[rows] == SAME, unknown, distances.error[rows])
    gap = np.maximum(error * norm, unseen)
    whole = np.sqrt((norm**2).sum())
    total = float(np.sqrt((gap**2).sum()) / whole) if whole else 0.0
    absolute, largest = np.zeros(dataflow.frames), np.zeros(dataflow.frames)
    parameter = inverse(rows, len(pairs))[dataflow.owners.pair]
    at = parameter >= 0
    np.maximum.at(absolute, dataflow.owners.frame[at], gap[parameter[at]])
    np.maximum.at(largest, dataflow.owners.frame[at], norm[parameter[at]])
    of_frames = np.divide(absolute, largest, out=np.zeros(dataflow.frames), where=largest > 0)
    return ErrorGrowth(total, np.maximum(np.minimum(of_frames, NO_NUMBER), total), unseen)


def _unseen(tables: PairedTables, rows: np.ndarray, scale: np.ndarray, previous: PreviousStep | None) -> np.ndarray:
    if previous is None or len(previous.unseen) != len(rows):
        return np.zeros(len(rows))
    sketch = tables.a.sketch[tables.pairs.measured_a[rows]]
    change = np.linalg.norm(sketch - previous.sketch_a, axis=1) * scale
    apart = np.sqrt(np.nan_to_num(previous.gradient_errors, nan=1.0))
    return previous.unseen + np.where(scale > 1, UNSEEN * apart * change, 0.0)
