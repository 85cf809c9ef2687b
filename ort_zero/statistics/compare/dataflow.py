"""What each value of a step was computed from, as index arrays.

The code of a module that runs between its children is called a frame here; a frame is known by the number of its call.
A value made in a frame was computed from what came into the frame before: its inputs, the outputs of the children that
ran earlier, and the module's own parameters. Gradients flow the other way, through every frame in which the tensor was
there to be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ort_zero.statistics.compare.align import Pairs
from ort_zero.statistics.compare.layout import INPUT, INSPECT, OUTPUT
from ort_zero.statistics.records import Phase

_STRIDE = 16.0
"""Distance between the values of neighbouring frames, larger than any error: running maxima of all frames are taken at
once by lifting each frame above the one before."""
_MOST_SIBLINGS = 8


@dataclass(frozen=True, slots=True, eq=False)
class FrameEntries:
    """Pairs in frames, ordered by frame and then by time."""

    frame: np.ndarray
    order: np.ndarray
    pair: np.ndarray

    @classmethod
    def of(cls, *parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> FrameEntries:
        """Return the entries of several unordered (frames, orders, pairs)."""
        frame, order, pair = (np.concatenate(columns) for columns in zip(*parts))
        by_time = np.lexsort((order, frame))
        return cls(frame[by_time], order[by_time], pair[by_time])

    def before(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the number of entries up to the last one of `frames` earlier than `orders`."""
        return self._search(frames, orders, "left")

    def after(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the first entry of `frames` later than `orders`."""
        return self._search(frames, orders, "right")

    def _search(self, frames: np.ndarray, orders: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
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


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Tensors that are there to be used in frames; three arrays of one length."""

    pair: np.ndarray
    """The pair of the tensor."""
    frame: np.ndarray
    """The frame in which it can be used."""
    after: np.ndarray
    """The first entry among what frames compute that can depend on it."""


@dataclass(frozen=True, slots=True, eq=False)
class FurtherOutputs:
    """Outputs besides the first one of their call, such as attention's weights.

    What the call computed before it returned may have been computed from them, not they from it.
    """

    pair: np.ndarray
    last: np.ndarray
    """For each output the number of entries of ``Dataflow.computed_first`` up to the last one of its call."""
    siblings: np.ndarray
    """[n, 2]: outputs of one call, of which the second may be computed from the first or the other way round."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The frames that use parameters: two arrays of one length."""

    pair: np.ndarray
    """The pair of a parameter or of its gradient."""
    frame: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Dataflow:
    """The values that each value of a step was computed from, as index arrays."""

    pairs: Pairs
    frames: int
    """Number of frames in the step."""
    forward: np.ndarray
    """Pairs of the forward phase, in the order of time."""
    order: np.ndarray
    """Order of each pair of the forward phase among the records of the phase."""
    frame: np.ndarray
    """For each pair of the forward phase the frame whose code computed it; -1 for the model's own inputs."""
    frame_of_call: dict[int, int]
    known: FrameEntries
    """The values that a frame knows: its inputs, children's outputs, what it computed."""
    computed: FrameEntries
    """The values that a frame computed: inputs of children, and its outputs, as far as they are new."""
    computed_first: FrameEntries
    """The values that a frame computed, without further outputs."""
    uses: Uses
    """Every tensor in each frame where it can be used, with `after` among :attr:`computed`."""
    passed: Uses
    """The values that frames computed and passed to children, with `after` among :attr:`computed_first`."""
    returned: np.ndarray
    """Pairs that the model returns."""
    further: FurtherOutputs
    owners: Owners

    def largest_known(self, values: np.ndarray) -> np.ndarray:
        """Return for each frame the largest number among those of what it knows, of a number for each pair."""
        return _largest(self.frames, self.known.frame, values[self.pairs.reference][self.known.pair])

    def largest_input(self, values: np.ndarray) -> np.ndarray:
        """Return for each frame the largest number among those of its inputs, of a number for each pair; at least 0."""
        taken, frames = self.inputs()
        return _largest(self.frames, frames, values[self.pairs.reference][taken])

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that are inputs of calls, and the frames of those calls."""
        taken = self.forward[self.pairs.kind[self.forward] == INPUT]
        calls = self.pairs.a.table.call[self.pairs.row_a[taken]].tolist()
        return taken, np.array([self.frame_of_call[call] for call in calls], int)

    def largest_around(self, of_frames: np.ndarray) -> np.ndarray:
        """Return for each pair the largest number among those of the frames in which it is there to be used."""
        found = _largest(len(self.pairs), self.uses.pair, of_frames[self.uses.frame])
        np.maximum.at(found, self.passed.pair, of_frames[self.passed.frame])
        return found

    def largest_gradient(self, of_gradients: np.ndarray) -> np.ndarray:
        """Return for each frame the largest number among those of the gradients that come in.

        They come in at what the frame computed or returns.

        Args:
            of_gradients: a number for the gradient of each pair of the forward phase.
        """
        found = _largest(self.frames, self.computed.frame, of_gradients[self.computed.pair])
        outputs = self.forward[self.pairs.kind[self.forward] == OUTPUT]
        np.maximum.at(found, self.frame[outputs], of_gradients[self.pairs.reference[outputs]])
        return found

    def owners_of_gradients(self) -> Owners:
        """Return the frames that use each parameter, by the pair of the parameter's gradient."""
        at = self.pairs.phase[self.owners.pair] == Phase.PARAMETER_GRADIENT
        return Owners(self.owners.pair[at], self.owners.frame[at])


def _largest(length: int, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.zeros(length)
    np.maximum.at(found, indices, values)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """Where and when the values of the forward phase come into being; arrays over all pairs, -1 for other phases."""

    pairs: Pairs
    forward: np.ndarray
    """The pairs of the forward phase."""
    frame_of_call: dict[int, int]
    order: np.ndarray
    inside: np.ndarray
    """The frame of the call that takes or returns the value."""
    outside: np.ndarray
    """The frame around that call."""
    frame: np.ndarray
    """The frame whose code computed the value."""

    def select(self, condition: np.ndarray) -> np.ndarray:
        """Return the pairs of the forward phase for which a condition holds."""
        return np.flatnonzero((self.order >= 0) & condition)


def dataflow_of(pairs: Pairs) -> Dataflow:
    """Return what is computed from what in a step."""
    at = _positions(pairs)
    kind = pairs.kind
    given = at.select((kind == OUTPUT) & (at.outside >= 0))
    # what the model returns is used outside, where only its own error is known
    returned = at.select((kind == OUTPUT) & (at.outside < 0))
    passed = at.select(pairs.own & (kind == INPUT) & (at.outside >= 0))
    new = at.select(pairs.own & (at.frame >= 0))
    further = _further_outputs(at)
    computed = FrameEntries.of((at.frame[new], at.order[new], new))
    first = np.setdiff1d(new, further)
    computed_first = FrameEntries.of((at.frame[first], at.order[first], first))
    return Dataflow(
        pairs=pairs,
        frames=1 + max(at.frame_of_call.values(), default=-1),
        forward=at.forward,
        order=at.order,
        frame=at.frame,
        frame_of_call=at.frame_of_call,
        known=_known(at, given, passed),
        computed=computed,
        computed_first=computed_first,
        uses=_uses(at, computed, given, returned),
        passed=Uses(passed, at.frame[passed], computed_first.after(at.outside[passed], at.order[passed])),
        returned=np.unique(pairs.reference[returned]),
        further=FurtherOutputs(
            further, computed_first.before(at.inside[further], at.order[further]), _siblings(pairs, at.forward)
        ),
        owners=_owners(pairs, at.frame_of_call),
    )


def _positions(pairs: Pairs) -> _Positions:
    table, rows = pairs.a.table, pairs.row_a
    forward = np.flatnonzero(pairs.phase == Phase.FORWARD)
    frame_of_call = _frames(pairs, forward)
    order, inside, outside = (np.full(len(pairs), -1, np.int64) for _ in range(3))
    order[forward] = table.order[rows[forward]]
    inside[forward] = [frame_of_call[call] for call in table.call[rows[forward]].tolist()]
    outside[forward] = [frame_of_call.get(call, -1) for call in table.caller[rows[forward]].tolist()]
    frame = np.where(pairs.kind == INPUT, outside, inside)
    return _Positions(pairs, forward, frame_of_call, order, inside, outside, frame)


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


def _known(at: _Positions, given: np.ndarray, passed: np.ndarray) -> FrameEntries:
    """Return what frames know: what goes into them or is inspected, children's outputs, what they pass to children."""
    return FrameEntries.of(
        (at.inside[at.forward], at.order[at.forward], at.forward),
        (at.outside[given], at.order[given], given),
        (at.outside[passed], at.order[passed], passed),
    )


def _uses(at: _Positions, computed: FrameEntries, given: np.ndarray, returned: np.ndarray) -> Uses:
    """Return where tensors can be used: inside the call that takes them, around the call that returns or takes them."""
    entering = at.select(at.pairs.kind != OUTPUT)
    used = np.concatenate([entering, given, returned])
    frames = np.concatenate([at.inside[entering], at.outside[given], at.inside[returned]])
    return Uses(at.pairs.reference[used], frames, computed.after(frames, at.order[used]))


def _further_outputs(at: _Positions) -> np.ndarray:
    pairs = at.pairs
    outputs = at.forward[pairs.kind[at.forward] == OUTPUT]
    _, first = np.unique(pairs.a.table.call[pairs.row_a[outputs]], return_index=True)
    later = np.ones(len(outputs), bool)
    later[first] = False
    return outputs[later & pairs.own[outputs]]


def _siblings(pairs: Pairs, forward: np.ndarray) -> np.ndarray:
    by_call: dict[int, list[int]] = {}
    outputs = forward[(pairs.kind[forward] == OUTPUT) & pairs.own[forward]]
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


def _owners(pairs: Pairs, frame_of_call: dict[int, int]) -> Owners:
    """Return the frames that use each parameter: those of its module's calls, else of the nearest module around it."""
    table = pairs.a.table
    frames: dict[str, set[int]] = {}
    for row in np.flatnonzero(table.phase == Phase.FORWARD).tolist():
        frames.setdefault(table.module[row], set()).add(frame_of_call[int(table.call[row])])
    owned, owner = [], []
    for number in np.flatnonzero(pairs.kind > INSPECT).tolist():
        module = table.module[pairs.row_a[number]]
        while module and module not in frames:
            module = module.rpartition(".")[0]
        for frame in sorted(frames.get(module, ())):
            owned.append(number)
            owner.append(frame)
    return Owners(np.array(owned, np.int64), np.array(owner, np.int64))
