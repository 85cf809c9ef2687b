"""What each value of a step was computed from, as index arrays: the largest error among it is what a record inherits.

The code of a module that runs between its children is called a frame here; a frame is known by the number of its call.
A value made in a frame was computed from what came into the frame before: its inputs, the outputs of the children that
ran earlier, and the module's own parameters. Gradients flow the other way, through every frame in which the tensor was
there to be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.align import INPUT, INSPECT, OUTPUT, Pairs
from ort_zero.statistics.records import Phase

_STRIDE = 16.0
"""More than any error: running maxima of all frames are taken at once by lifting each frame above the one before."""
_MOST_SIBLINGS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Pairs in frames, ordered by frame and then by time, and where frames begin."""

    frame: np.ndarray
    order: np.ndarray
    pair: np.ndarray

    def before(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the number of entries up to the last one of `frames` earlier than `orders`."""
        return self._places(frames, orders, "left")

    def after(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the first entry of `frames` later than `orders`."""
        return self._places(frames, orders, "right")

    def _places(self, frames: np.ndarray, orders: np.ndarray, side: str) -> np.ndarray:
        span = 1 + max(int(self.order.max(initial=0)), int(orders.max(initial=0)))
        return np.searchsorted(self.frame * span + self.order, frames * span + orders, side)

    def running(self, values: np.ndarray) -> np.ndarray:
        """Return the largest of each entry and the earlier ones of its frame."""
        lifted = self.frame * _STRIDE
        return np.maximum.accumulate(values + lifted) - lifted if len(values) else values

    def remaining(self, values: np.ndarray) -> np.ndarray:
        """Return the largest of each entry and the later ones of its frame."""
        lifted = -self.frame * _STRIDE
        return np.maximum.accumulate((values + lifted)[::-1])[::-1] - lifted if len(values) else values


def _runs(frames: list[np.ndarray], orders: list[np.ndarray], pairs: list[np.ndarray]) -> Runs:
    frame, order, pair = np.concatenate(frames), np.concatenate(orders), np.concatenate(pairs)
    by_time = np.lexsort((order, frame))
    return Runs(frame[by_time], order[by_time], pair[by_time])


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """Who inherits from whom in a step."""

    pairs: Pairs
    frames: int
    forward: np.ndarray
    """Pairs of the forward phase, by time."""
    order: np.ndarray
    """Place in time of each pair of the forward phase."""
    frame: np.ndarray
    """For each pair of the forward phase the frame whose code computed it; -1 for the model's own inputs."""
    frame_of_call: dict[int, int]
    seen: Runs
    """What a frame knows: its inputs, children's outputs, what it made."""
    made: Runs
    """What a frame made: inputs of children, and its outputs, as far as they are new."""
    used_pair: np.ndarray
    """For each use of a tensor in a frame: the tensor's pair ..."""
    used_frame: np.ndarray
    """... the frame ..."""
    used_after: np.ndarray
    """... and the first entry of `made` that can depend on it."""
    returned: np.ndarray
    """What the model returns."""
    made_first: Runs
    """The same without `aside`."""
    passed: np.ndarray
    """What frames made and passed to children ..."""
    passed_after: np.ndarray
    """... and the first entry of `made_first` that can depend on each."""
    aside: np.ndarray
    """Outputs besides the first one of their call, such as attention's weights. What the call made before it returned
    may have been computed from them, not they from it ..."""
    aside_last: np.ndarray
    """... this is the number of entries of `made_first` up to the last one of that."""
    siblings: np.ndarray
    """[n, 2]: outputs of one call, of which the second may be computed from the first or the other way round."""
    owner: np.ndarray
    """For each pair of a parameter or its gradient [n, frame]: see `owned`."""
    owned: np.ndarray
    """The pairs of parameters and their gradients of `owner`."""


def lineage_of(pairs: Pairs) -> Lineage:
    """Return what is computed from what."""
    table, rows = pairs.a.table, pairs.row_a
    forward = np.flatnonzero(pairs.phase == Phase.FORWARD)
    frame_of_call = _frames(pairs, forward)
    kind, own = pairs.a.kind[rows], pairs.own
    order = np.full(len(pairs), -1, np.int64)
    order[forward] = table.order[rows[forward]]
    inside, outside = np.full(len(pairs), -1, np.int64), np.full(len(pairs), -1, np.int64)
    inside[forward] = [frame_of_call[call] for call in table.call[rows[forward]].tolist()]
    outside[forward] = [frame_of_call.get(call, -1) for call in table.caller[rows[forward]].tolist()]
    frame = np.where(kind == INPUT, outside, inside)

    is_forward = order >= 0
    taken = np.flatnonzero(is_forward)
    given = np.flatnonzero(is_forward & (kind == OUTPUT) & (outside >= 0))
    new = np.flatnonzero(is_forward & own & (frame >= 0))
    crossing = np.flatnonzero(is_forward & own & (kind == INPUT) & (outside >= 0))
    seen = _runs([inside[taken], outside[given], outside[crossing]], [order[taken], order[given], order[crossing]],
                 [taken, given, crossing])  # fmt: skip
    made = _runs([frame[new]], [order[new]], [new])
    aside = _aside(pairs, forward, kind)
    new = np.setdiff1d(new, aside)
    made_first = _runs([frame[new]], [order[new]], [new])
    # a tensor is there to be used inside the call that takes it, around the call that returns or takes it
    entering = np.flatnonzero(is_forward & (kind != OUTPUT))
    # what the model returns is used outside, where only its own error is known
    returned = np.flatnonzero(is_forward & (kind == OUTPUT) & (outside < 0))
    used = np.concatenate([entering, given, returned])
    used_frame = np.concatenate([inside[entering], outside[given], inside[returned]])
    owned, owner = _owners(pairs, frame_of_call)
    return Lineage(
        pairs=pairs,
        frames=1 + max(frame_of_call.values(), default=-1),
        forward=forward,
        order=order,
        frame=frame,
        frame_of_call=frame_of_call,
        seen=seen,
        made=made,
        used_pair=pairs.reference[used],
        used_frame=used_frame,
        used_after=made.after(used_frame, order[used]),
        returned=np.unique(pairs.reference[returned]),
        made_first=made_first,
        passed=crossing,
        passed_after=made_first.after(outside[crossing], order[crossing]),
        aside=aside,
        aside_last=made_first.before(inside[aside], order[aside]),
        siblings=_siblings(pairs, forward, kind),
        owner=owner,
        owned=owned,
    )


def _frames(pairs: Pairs, forward: np.ndarray) -> dict[int, int]:
    """Return the frame of each call, numbered from 0.

    A call without inputs that both runs have (a wrapper that only one has, a module that reads an object) sees what its
    caller sees.
    """
    table = pairs.a.table
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    caller = dict(zip(table.call[rows].tolist(), table.caller[rows].tolist()))
    taking = pairs.row_a[forward]
    with_inputs = set(table.call[taking[pairs.a.kind[taking] == INPUT]].tolist())
    frame_of_call: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for call in sorted(caller):
        top = call
        while top not in with_inputs and caller.get(top, -1) >= 0:
            top = caller[top]
        frame_of_call[call] = numbers.setdefault(top, len(numbers))
    return frame_of_call


def _aside(pairs: Pairs, forward: np.ndarray, kind: np.ndarray) -> np.ndarray:
    outputs = forward[kind[forward] == OUTPUT]
    _, first = np.unique(pairs.a.table.call[pairs.row_a[outputs]], return_index=True)
    later = np.ones(len(outputs), bool)
    later[first] = False
    return outputs[later & pairs.own[outputs]]


def _siblings(pairs: Pairs, forward: np.ndarray, kind: np.ndarray) -> np.ndarray:
    by_call: dict[int, list[int]] = {}
    outputs = forward[(kind[forward] == OUTPUT) & pairs.own[forward]]
    for number, call in zip(outputs.tolist(), pairs.a.table.call[pairs.row_a[outputs]].tolist()):
        by_call.setdefault(call, []).append(number)
    found = [
        (one, other)
        for group in by_call.values()
        for one in group[:_MOST_SIBLINGS]
        for other in group[:_MOST_SIBLINGS]
        if one != other
    ]
    return np.array(found, np.int64).reshape(-1, 2)


def _owners(pairs: Pairs, frame_of_call: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames that use each parameter: those of its module's calls, else of the nearest module around it."""
    table = pairs.a.table
    frames: dict[str, set[int]] = {}
    for row in np.flatnonzero(table.phase == Phase.FORWARD).tolist():
        frames.setdefault(table.module[row], set()).add(frame_of_call[int(table.call[row])])
    owned, owner = [], []
    for number in np.flatnonzero(pairs.a.kind[pairs.row_a] > INSPECT).tolist():
        module = table.module[pairs.row_a[number]]
        while module and module not in frames:
            module = module.rpartition(".")[0]
        for frame in sorted(frames.get(module, ())):
            owned.append(number)
            owner.append(frame)
    return np.array(owned, np.int64), np.array(owner, np.int64)


def inherit(lineage: Lineage, errors: np.ndarray, known: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return the largest error among what each pair was computed from.

    Args:
        lineage: who inherits from whom.
        errors: of all pairs, below :data:`_STRIDE`.
        known: False for pairs that were not compared.
        parameters: the error that each frame's own parameters bring.
    """
    pairs = lineage.pairs
    result = np.zeros(len(pairs))
    forward = lineage.forward
    resolved = np.where(known, errors, 0.0)[pairs.reference]
    running = np.append(lineage.seen.running(resolved[lineage.seen.pair]), 0.0)
    inner = forward[lineage.frame[forward] >= 0]
    result[inner] = _before(lineage.seen, running, lineage.frame[inner], lineage.order[inner])
    result[inner] = np.maximum(result[inner], parameters[lineage.frame[inner]])
    in_frame = np.maximum(_largest(lineage.frames, lineage.seen.frame, resolved[lineage.seen.pair]), parameters)
    gradients = _gradient_errors(lineage, errors, known)
    _inherit_backward(lineage, gradients, in_frame, result)
    _inherit_parameters(lineage, gradients, in_frame, result)
    return result


def _before(runs: Runs, running: np.ndarray, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
    return _last(runs, running, frames, runs.before(frames, orders) - 1)


def _last(runs: Runs, running: np.ndarray, frames: np.ndarray, last: np.ndarray) -> np.ndarray:
    there = (last >= 0) & (runs.frame[np.maximum(last, 0)] == frames) if len(runs.frame) else np.zeros(len(last), bool)
    return np.where(there, running[last], 0.0)


def _largest(length: int, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.zeros(length)
    np.maximum.at(found, places, values)
    return found


def _gradient_errors(lineage: Lineage, errors: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the error of each forward pair's gradient; where it is not known, the largest of all later ones."""
    pairs = lineage.pairs
    gradient = pairs.gradient[lineage.forward]
    there = (gradient >= 0) & known[gradient]
    values = np.where(there, errors[gradient], 0.0)
    later = np.maximum.accumulate(values[::-1])[::-1]
    found = np.zeros(len(pairs))
    found[lineage.forward] = np.where(there, values, later)
    return found


def _inherit_backward(lineage: Lineage, gradients: np.ndarray, in_frame: np.ndarray, result: np.ndarray) -> None:
    pairs = lineage.pairs
    found = np.zeros(len(pairs))
    behind = _behind(lineage.made, gradients, lineage.used_frame, lineage.used_after)
    np.maximum.at(found, lineage.used_pair, np.maximum(behind, in_frame[lineage.used_frame]))
    frames = lineage.frame[lineage.passed]
    behind = _behind(lineage.made_first, gradients, frames, lineage.passed_after)
    np.maximum.at(found, lineage.passed, np.maximum(behind, in_frame[frames]))
    if len(lineage.aside):
        running = np.append(lineage.made_first.running(gradients[lineage.made_first.pair]), 0.0)
        earlier = _last(lineage.made_first, running, lineage.frame[lineage.aside], lineage.aside_last - 1)
        np.maximum.at(found, lineage.aside, earlier)
    if len(lineage.siblings):
        np.maximum.at(found, lineage.siblings[:, 0], gradients[lineage.siblings[:, 1]])
    with_gradient = lineage.forward[pairs.gradient[lineage.forward] >= 0]
    result[pairs.gradient[with_gradient]] = found[with_gradient]


def _behind(runs: Runs, gradients: np.ndarray, frames: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the largest error of gradients from an entry of `runs` on, as far as they belong to `frames`."""
    remaining = np.append(runs.remaining(gradients[runs.pair]), 0.0)
    return np.where(np.append(runs.frame, -1)[after] == frames, remaining[after], 0.0)


def _inherit_parameters(lineage: Lineage, gradients: np.ndarray, in_frame: np.ndarray, result: np.ndarray) -> None:
    behind = gradient_of_frames(lineage, gradients)
    at = lineage.pairs.phase[lineage.owned] == Phase.PARAMETER_GRADIENT
    owned, owner = lineage.owned[at], lineage.owner[at]
    np.maximum.at(result, owned, np.maximum(behind[owner], in_frame[owner]))


def gradient_of_frames(lineage: Lineage, of_gradients: np.ndarray) -> np.ndarray:
    """Return for each frame the largest number among those of the gradients that come in: at what it made or returns.

    Args:
        lineage: who inherits from whom.
        of_gradients: a number for the gradient of each pair of the forward phase.
    """
    pairs = lineage.pairs
    made = lineage.made
    found = _largest(lineage.frames, made.frame, of_gradients[made.pair])
    outputs = lineage.forward[(pairs.a.kind[pairs.row_a[lineage.forward]] == OUTPUT)]
    np.maximum.at(found, lineage.frame[outputs], of_gradients[pairs.reference[outputs]])
    return found
