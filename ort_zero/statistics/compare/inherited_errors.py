"""The largest error among what each value was computed from: what a record inherits."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.dataflow import Dataflow, FrameEntries


def inherited_errors(dataflow: Dataflow, errors: np.ndarray, known: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return the largest error among what each pair was computed from.

    Args:
        dataflow: what was computed from what.
        errors: errors of all pairs, at most :data:`~.distance.NO_NUMBER`.
        known: False for pairs that were not compared.
        parameters: the error that each frame's own parameters bring.
    """
    result = np.zeros(len(dataflow.pairs))
    known_errors = np.where(known, errors, 0.0)
    _inherit_forward(dataflow, known_errors, parameters, result)
    in_frames = np.maximum(dataflow.largest_known(known_errors), parameters)
    gradients = _gradient_errors(dataflow, errors, known)
    _inherit_backward(dataflow, gradients, in_frames, result)
    owners = dataflow.owners_of_gradients()
    behind = dataflow.largest_gradient(gradients)
    np.maximum.at(result, owners.pair, np.maximum(behind, in_frames)[owners.frame])
    return result


def _inherit_forward(dataflow: Dataflow, errors: np.ndarray, parameters: np.ndarray, result: np.ndarray) -> None:
    entries = dataflow.known
    running = np.append(entries.running(errors[dataflow.pairs.reference][entries.pair]), 0.0)
    inner = dataflow.forward[dataflow.frame[dataflow.forward] >= 0]
    frames = dataflow.frame[inner]
    last = entries.before(frames, dataflow.order[inner]) - 1
    result[inner] = np.maximum(_at_last(entries, running, frames, last), parameters[frames])


def _at_last(entries: FrameEntries, running: np.ndarray, frames: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the running values at the entries `last`, 0 where those do not belong to `frames`."""
    there = np.zeros(len(last), bool)
    if len(entries.frame):
        there = (last >= 0) & (entries.frame[np.maximum(last, 0)] == frames)
    return np.where(there, running[last], 0.0)


def _gradient_errors(dataflow: Dataflow, errors: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the error of each forward pair's gradient; where it is not known, the largest of all later ones."""
    gradient = dataflow.pairs.gradient[dataflow.forward]
    there = (gradient >= 0) & known[gradient]
    values = np.where(there, errors[gradient], 0.0)
    later = np.maximum.accumulate(values[::-1])[::-1]
    found = np.zeros(len(dataflow.pairs))
    found[dataflow.forward] = np.where(there, values, later)
    return found


def _inherit_backward(dataflow: Dataflow, gradients: np.ndarray, in_frames: np.ndarray, result: np.ndarray) -> None:
    found = np.zeros(len(dataflow.pairs))
    for uses, entries in (
        (dataflow.uses, dataflow.computed),
        (dataflow.passed, dataflow.computed_first),
    ):
        behind = _behind(entries, gradients, uses.frame, uses.after)
        np.maximum.at(found, uses.pair, np.maximum(behind, in_frames[uses.frame]))
    further = dataflow.further
    if len(further.pair):
        entries = dataflow.computed_first
        running = np.append(entries.running(gradients[entries.pair]), 0.0)
        earlier = _at_last(entries, running, dataflow.frame[further.pair], further.last - 1)
        np.maximum.at(found, further.pair, earlier)
    if len(further.siblings):
        np.maximum.at(found, further.siblings[:, 0], gradients[further.siblings[:, 1]])
    with_gradient = dataflow.forward[dataflow.pairs.gradient[dataflow.forward] >= 0]
    result[dataflow.pairs.gradient[with_gradient]] = found[with_gradient]


def _behind(entries: FrameEntries, gradients: np.ndarray, frames: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the largest error of gradients from the entries `after` on, as far as they belong to `frames`."""
    remaining = np.append(entries.remaining(gradients[entries.pair]), 0.0)
    return np.where(np.append(entries.frame, -1)[after] == frames, remaining[after], 0.0)
