"""Compute the inherited error of each record: the largest error among the inputs of its computation."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.dataflow import Dataflow


def inherited_errors(dataflow: Dataflow, errors: np.ndarray, usable: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return for each pair the largest error among the inputs of its computation.

    Args:
        dataflow: the inputs of each value.
        errors: errors of all pairs, at most :data:`~.distance.NO_NUMBER`.
        usable: False for pairs that were not compared.
        parameters: the error of each frame's parameters.
    """
    result = np.zeros(len(dataflow.pairs))
    usable_errors = np.where(usable, errors, 0.0).tolist()
    in_frames = parameters.tolist()
    for value in dataflow.values:
        if value.frame >= 0:
            result[value.pair] = in_frames[value.frame]
        for frame in value.readers:
            in_frames[frame] = max(in_frames[frame], usable_errors[value.reference])
    gradients = _gradient_errors(dataflow, errors, usable)
    values, of_values = dataflow.with_gradient()
    result[of_values] = _inherited_by_gradients(dataflow, gradients.tolist(), in_frames)[values]
    owners = dataflow.owners_of_gradients()
    behind = np.maximum(dataflow.largest_gradient(gradients), in_frames)
    np.maximum.at(result, owners.pair, behind[owners.frame])
    return result


def _gradient_errors(dataflow: Dataflow, errors: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Return the error of each forward pair's gradient; without a compared gradient, the largest of all later pairs."""
    gradient = dataflow.pairs.gradient[dataflow.forward]
    has_error = (gradient >= 0) & usable[gradient]
    values = np.where(has_error, errors[gradient], 0.0)
    later = np.maximum.accumulate(values[::-1])[::-1]
    gradient_errors = np.zeros(len(dataflow.pairs))
    gradient_errors[dataflow.forward] = np.where(has_error, values, later)
    return gradient_errors


def _inherited_by_gradients(dataflow: Dataflow, gradients: list[float], in_frames: list[float]) -> np.ndarray:
    """Return for each forward pair the error that its gradient inherits: from gradients of values computed from it."""
    inherited = [0.0] * len(gradients)
    later, later_first, earlier = ([0.0] * dataflow.frames for _ in range(3))
    for value in reversed(dataflow.values):
        pair, frame, user = value.pair, value.frame, value.user
        inherited[value.reference] = max(inherited[value.reference], later[user], in_frames[user])
        if value.is_passed:
            inherited[pair] = max(inherited[pair], later_first[frame], in_frames[frame])
        if value.is_new:
            later[frame] = max(later[frame], gradients[pair])
            if not value.is_further:
                later_first[frame] = max(later_first[frame], gradients[pair])
    for value in dataflow.values:
        if value.is_further:
            inherited[value.pair] = max(inherited[value.pair], earlier[value.frame])
        elif value.is_new:
            earlier[value.frame] = max(earlier[value.frame], gradients[value.pair])
    for siblings in dataflow.siblings:
        for one in siblings:
            inherited[one] = max(inherited[one], *(gradients[other] for other in siblings if other != one))
    return np.array(inherited)
