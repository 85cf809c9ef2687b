"""Estimate the errors of the parameters of two runs at the beginning of a step, also from samples of the parameters."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.align import inverse
from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.compare.step import NO_NUMBER, SAME, StepComparison
from ort_zero.statistics.records import Phase

UNKNOWN_ERROR = 1e-2
"""Error of parameters after step 0 if they were not collected, or were sampled differently."""
UNSEEN = 4.0
"""Factor on sqrt(x) in the assumed relative error of the changes of parameter elements outside of the samples, if the
gradients' relative error is x. Adam turns a gradient element that is only noise into a whole step. About the share x
of the elements has such a gradient: the changes of a parameter then differ by about sqrt(x) of their size, in so few
elements that a sample may contain none."""


def estimate_parameter_errors(step: StepComparison, dataflow: Dataflow, previous: StepComparison | None) -> np.ndarray:
    """Set the relative error of all parameters, and return the error of each frame's parameters, at least that of all.

    The error of a frame is relative to the frame's largest parameter norm: a bias near 0 has a large relative error
    and almost no effect. Only one module owns tied parameters.
    """
    pairs, owners, frames = step.pairs, dataflow.owners, dataflow.frames
    unknown = 0.0 if step.is_first else UNKNOWN_ERROR
    rows = step.parameters()
    if not len(rows):
        step.parameter_error, step.unseen = unknown, np.zeros(0)
        return np.full(frames, unknown)
    scale = step.unsampled()[rows]
    norm = np.maximum(step.a.l2[pairs.a.rows[rows]], step.b.l2[pairs.b.rows[rows]]) * scale
    step.unseen = _unseen(step, scale, previous)
    error = np.where(step.difference[rows] == SAME, unknown, step.error[rows])
    gap = np.maximum(error * norm, step.unseen)
    whole = np.sqrt((norm**2).sum())
    step.parameter_error = float(np.sqrt((gap**2).sum()) / whole) if whole else 0.0
    absolute, largest = np.zeros(frames), np.zeros(frames)
    parameter = inverse(rows, len(pairs))[owners.pair]
    at = parameter >= 0
    np.maximum.at(absolute, owners.frame[at], gap[parameter[at]])
    np.maximum.at(largest, owners.frame[at], norm[parameter[at]])
    of_frames = np.divide(absolute, largest, out=np.zeros(frames), where=largest > 0)
    return np.maximum(np.minimum(of_frames, NO_NUMBER), step.parameter_error)


def _unseen(step: StepComparison, scale: np.ndarray, previous: StepComparison | None) -> np.ndarray:
    if previous is None or len(previous.unseen) != len(scale):
        return np.zeros(len(scale))
    change = np.linalg.norm(step.parameter_sketches()[0] - previous.parameter_sketches()[0], axis=1) * scale
    apart = np.sqrt(np.nan_to_num(gradient_error(previous), nan=1.0))
    return previous.unseen + np.where(scale > 1, UNSEEN * apart * change, 0.0)


def gradient_error(step: StepComparison) -> float:
    """Return the median relative error of the gradients of parameters, else of activations; NaN without gradients."""
    for phase in (Phase.PARAMETER_GRADIENT, Phase.BACKWARD):
        errors = step.error[(step.pairs.phase == phase) & (step.difference != SAME)]
        if len(errors):
            return float(np.median(errors))
    return np.nan
