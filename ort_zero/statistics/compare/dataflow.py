"""Find the inputs of each value of a step, as index arrays.

A *frame* is the code of one module call that runs between the calls of its children; frames are numbered by call.
A frame computes a value from the inputs of the call, the outputs of the children that ran earlier, and the parameters
of the module. Gradients flow the other way, through every frame that can use the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ort_zero.statistics.compare.align import Pairs
from ort_zero.statistics.compare.layout import INPUT, INSPECT, OUTPUT
from ort_zero.statistics.records import Phase

_STRIDE = 16.0
"""Offset between the values of neighbouring frames, larger than any error: with the offsets, one running maximum over
all frames restarts at each frame."""
_MAX_SIBLINGS = 8


@dataclass(frozen=True, slots=True, eq=False)
class FrameEntries:
    """The pairs in frames, ordered by frame and then by time."""

    frame: np.ndarray
    order: np.ndarray
    pair: np.ndarray

    @classmethod
    def of(cls, *parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> FrameEntries:
        """Merge several (frames, orders, pairs) into ordered entries."""
        frame, order, pair = (np.concatenate(columns) for columns in zip(*parts))
        by_time = np.lexsort((order, frame))
        return cls(frame[by_time], order[by_time], pair[by_time])

    def before(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the index behind the last entry of its frame in `frames` and before its order."""
        return self._search(frames, orders, "left")

    def after(self, frames: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """Return for each query the index of the first entry of its frame in `frames` and after its order."""
        return self._search(frames, orders, "right")

    def _search(self, frames: np.ndarray, orders: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        span = 1 + max(int(self.order.max(initial=0)), int(orders.max(initial=0)))
        return np.searchsorted(self.frame * span + self.order, frames * span + orders, side)

    def running(self, values: np.ndarray) -> np.ndarray:
        """Return for each entry the largest value among the entry and the earlier entries of its frame."""
        lifted = self.frame * _STRIDE
        return np.maximum.accumulate(values + lifted) - lifted if len(values) else values

    def remaining(self, values: np.ndarray) -> np.ndarray:
        """Return for each entry the largest value among the entry and the later entries of its frame."""
        lifted = -self.frame * _STRIDE
        return np.maximum.accumulate((values + lifted)[::-1])[::-1] - lifted if len(values) else values


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The tensors that frames can use; three arrays of one length."""

    pair: np.ndarray
    """The pair of the tensor."""
    frame: np.ndarray
    """The frame that can use the tensor."""
    after: np.ndarray
    """Index of the first entry among the computed values that can depend on the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class FurtherOutputs:
    """The outputs of calls after the first output, such as attention's weights.

    Values that the call computed before it returned may depend on a further output.
    """

    pair: np.ndarray
    last: np.ndarray
    """For each output, the index behind the last entry of its call in ``Dataflow.computed_first``."""
    siblings: np.ndarray
    """[n, 2]: pairs of outputs of one call, each of which may be computed from the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The frames that use parameters: two arrays of one length."""

    pair: np.ndarray
    """The pair of a parameter or of its gradient."""
    frame: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Dataflow:
    """The inputs of each value of a step, as index arrays."""

    pairs: Pairs
    frames: int
    """Number of frames in the step."""
    forward: np.ndarray
    """Pairs of the forward phase, in the order of time."""
    order: np.ndarray
    """Order of each pair of the forward phase in its phase; -1 for other pairs."""
    frame: np.ndarray
    """For each pair of the forward phase, the frame whose code computed it; -1 for the model's inputs."""
    frame_of_call: dict[int, int]
    readable: FrameEntries
    """The values that a frame can read: its inputs, its children's outputs, values that it computed."""
    computed: FrameEntries
    """The new values that a frame computed: inputs of its children, and its outputs."""
    computed_first: FrameEntries
    """The new values that a frame computed, without further outputs."""
    uses: Uses
    """Every tensor in each frame that can use it, with `after` among :attr:`computed`."""
    passed: Uses
    """The values that frames computed and passed to children, with `after` among :attr:`computed_first`."""
    returned: np.ndarray
    """The pairs that the model returns."""
    further: FurtherOutputs
    owners: Owners

    def largest_readable(self, values: np.ndarray) -> np.ndarray:
        """Return for each frame the largest of `values`, a number for each pair, over all tensors that it can read."""
        return _largest(self.frames, self.readable.frame, values[self.pairs.reference][self.readable.pair])

    def largest_input(self, values: np.ndarray) -> np.ndarray:
        """Return for each frame the largest of `values`, a number for each pair, over its inputs; at least 0."""
        taken, frames = self.inputs()
        return _largest(self.frames, frames, values[self.pairs.reference][taken])

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that are inputs of calls, and the frames of those calls."""
        taken = self.forward[self.pairs.kind[self.forward] == INPUT]
        calls = self.pairs.a.table.call[self.pairs.row_a[taken]].tolist()
        return taken, np.array([self.frame_of_call[call] for call in calls], int)

    def largest_around(self, of_frames: np.ndarray) -> np.ndarray:
        """Return for each pair the largest of `of_frames`, a number for each frame, over the frames that can use it."""
        largest = _largest(len(self.pairs), self.uses.pair, of_frames[self.uses.frame])
        np.maximum.at(largest, self.passed.pair, of_frames[self.passed.frame])
        return largest

    def largest_gradient(self, of_gradients: np.ndarray) -> np.ndarray:
        """Return for each frame the largest number of the gradients that flow into its backward.

        Gradients flow in at the values that the frame computed or returned.

        Args:
            of_gradients: a number for the gradient of each pair of the forward phase.
        """
        largest = _largest(self.frames, self.computed.frame, of_gradients[self.computed.pair])
        outputs = self.forward[self.pairs.kind[self.forward] == OUTPUT]
        np.maximum.at(largest, self.frame[outputs], of_gradients[self.pairs.reference[outputs]])
        return largest

    def owners_of_gradients(self) -> Owners:
        """Return the frames that use each parameter, with the pairs of the parameters' gradients."""
        at = self.pairs.phase[self.owners.pair] == Phase.PARAMETER_GRADIENT
        return Owners(self.owners.pair[at], self.owners.frame[at])


def _largest(length: int, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    largest = np.zeros(length)
    np.maximum.at(largest, indices, values)
    return largest


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """The order and the frames of the values of the forward phase; arrays over all pairs, -1 for other phases."""

    pairs: Pairs
    forward: np.ndarray
    """The pairs of the forward phase."""
    frame_of_call: dict[int, int]
    order: np.ndarray
    inside: np.ndarray
    """The frame of the call that takes or returns the value."""
    outside: np.ndarray
    """The frame of the enclosing call."""
    frame: np.ndarray
    """The frame whose code computed the value."""

    def select(self, condition: np.ndarray) -> np.ndarray:
        """Return the pairs of the forward phase for which a condition holds."""
        return np.flatnonzero((self.order >= 0) & condition)


def dataflow_of(pairs: Pairs) -> Dataflow:
    """Find the inputs of each value of a step."""
    at = _positions(pairs)
    kind = pairs.kind
    from_children = at.select((kind == OUTPUT) & (at.outside >= 0))
    # the model's outputs are used outside of the model, where nothing is recorded
    returned = at.select((kind == OUTPUT) & (at.outside < 0))
    passed = at.select(pairs.new_value & (kind == INPUT) & (at.outside >= 0))
    new = at.select(pairs.new_value & (at.frame >= 0))
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
        readable=_readable(at, from_children, passed),
        computed=computed,
        computed_first=computed_first,
        uses=_uses(at, computed, from_children, returned),
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
    """Return the number of the frame of each call; frames are numbered from 0.

    A call whose inputs are not in both runs shares its caller's frame: a wrapper of one run alone, or a module that
    reads tensors from an object.
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


def _readable(at: _Positions, from_children: np.ndarray, passed: np.ndarray) -> FrameEntries:
    """Return the values that frames can read: inputs, inspected tensors, children's outputs, children's inputs."""
    return FrameEntries.of(
        (at.inside[at.forward], at.order[at.forward], at.forward),
        (at.outside[from_children], at.order[from_children], from_children),
        (at.outside[passed], at.order[passed], passed),
    )


def _uses(at: _Positions, computed: FrameEntries, from_children: np.ndarray, returned: np.ndarray) -> Uses:
    """Return the frames that can use each tensor: of the call that takes the tensor, and of the caller that gets it."""
    entering = at.select(at.pairs.kind != OUTPUT)
    used = np.concatenate([entering, from_children, returned])
    frames = np.concatenate([at.inside[entering], at.outside[from_children], at.inside[returned]])
    return Uses(at.pairs.reference[used], frames, computed.after(frames, at.order[used]))


def _further_outputs(at: _Positions) -> np.ndarray:
    pairs = at.pairs
    outputs = at.forward[pairs.kind[at.forward] == OUTPUT]
    _, first = np.unique(pairs.a.table.call[pairs.row_a[outputs]], return_index=True)
    later = np.ones(len(outputs), bool)
    later[first] = False
    return outputs[later & pairs.new_value[outputs]]


def _siblings(pairs: Pairs, forward: np.ndarray) -> np.ndarray:
    by_call: dict[int, list[int]] = {}
    outputs = forward[(pairs.kind[forward] == OUTPUT) & pairs.new_value[forward]]
    for number, call in zip(outputs.tolist(), pairs.a.table.call[pairs.row_a[outputs]].tolist()):
        by_call.setdefault(call, []).append(number)
    siblings = [
        (one, other)
        for group in by_call.values()
        for one in group[:_MAX_SIBLINGS]
        for other in group[:_MAX_SIBLINGS]
        if one != other
    ]
    return np.array(siblings, np.int64).reshape(-1, 2)


def _owners(pairs: Pairs, frame_of_call: dict[int, int]) -> Owners:
    """Return the frames that use each parameter: the calls of its module, else of the nearest enclosing module."""
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
