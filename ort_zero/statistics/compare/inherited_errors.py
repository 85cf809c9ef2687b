"""Compute the inherited error of each record: the largest error among the inputs of its computation."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.dataflow import Dataflow, FrameEntries


def inherited_errors(dataflow: Dataflow, errors: np.ndarray, usable: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return for each pair the largest error among the inputs of its computation.

    Args:
        dataflow: the inputs of each value.
        errors: errors of all pairs, at most :data:`~.distance.NO_NUMBER`.
        usable: False for pairs that were not compared.
        parameters: the error of each frame's parameters.
    """
    result = np.zeros(len(dataflow.pairs))
    usable_errors = np.where(usable, errors, 0.0)
    _inherit_forward(dataflow, usable_errors, parameters, result)
    in_frames = np.maximum(dataflow.largest_readable(usable_errors), parameters)
    gradients = _gradient_errors(dataflow, errors, usable)
    _inherit_backward(dataflow, gradients, in_frames, result)
    owners = dataflow.owners_of_gradients()
    behind = dataflow.largest_gradient(gradients)
    np.maximum.at(result, owners.pair, np.maximum(behind, in_frames)[owners.frame])
    return result


def _inherit_forward(dataflow: Dataflow, errors: np.ndarray, parameters: np.ndarray, result: np.ndarray) -> None:
    entries = dataflow.readable
    running = np.append(entries.running(errors[dataflow.pairs.reference][entries.pair]), 0.0)
    inner = dataflow.forward[dataflow.frame[dataflow.forward] >= 0]
    frames = dataflow.frame[inner]
    last = entries.before(frames, dataflow.order[inner]) - 1
    result[inner] = np.maximum(_at_last(entries, running, frames, last), parameters[frames])


def _at_last(entries: FrameEntries, running: np.ndarray, frames: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the running values at the entries `last`, 0 for entries that do not belong to `frames`."""
    in_frame = np.zeros(len(last), bool)
    if len(entries.frame):
        in_frame = (last >= 0) & (entries.frame[np.maximum(last, 0)] == frames)
    return np.where(in_frame, running[last], 0.0)


def _gradient_errors(dataflow: Dataflow, errors: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Return the error of each forward pair's gradient; without a compared gradient, the largest of all later pairs."""
    gradient = dataflow.pairs.gradient[dataflow.forward]
    has_error = (gradient >= 0) & usable[gradient]
    values = np.where(has_error, errors[gradient], 0.0)
    later = np.maximum.accumulate(values[::-1])[::-1]
    gradient_errors = np.zeros(len(dataflow.pairs))
    gradient_errors[dataflow.forward] = np.where(has_error, values, later)
    return gradient_errors


def _inherit_backward(dataflow: Dataflow, gradients: np.ndarray, in_frames: np.ndarray, result: np.ndarray) -> None:
    inherited = np.zeros(len(dataflow.pairs))
    for uses, entries in (
        (dataflow.uses, dataflow.computed),
        (dataflow.passed, dataflow.computed_first),
    ):
        behind = _behind(entries, gradients, uses.frame, uses.after)
        np.maximum.at(inherited, uses.pair, np.maximum(behind, in_frames[uses.frame]))
    further = dataflow.further
    if len(further.pair):
        entries = dataflow.computed_first
        running = np.append(entries.running(gradients[entries.pair]), 0.0)
        earlier = _at_last(entries, running, dataflow.frame[further.pair], further.last - 1)
        np.maximum.at(inherited, further.pair, earlier)
    if len(further.siblings):
        np.maximum.at(inherited, further.siblings[:, 0], gradients[further.siblings[:, 1]])
    with_gradient = dataflow.forward[dataflow.pairs.gradient[dataflow.forward] >= 0]
    result[dataflow.pairs.gradient[with_gradient]] = inherited[with_gradient]


def _behind(entries: FrameEntries, gradients: np.ndarray, frames: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the largest gradient error from the entries `after` to the end of their frame, 0 in other frames."""
    remaining = np.append(entries.remaining(gradients[entries.pair]), 0.0)
    return np.where(np.append(entries.frame, -1)[after] == frames, remaining[after], 0.0)
