"""Find the inputs of each value of a step, and the largest error among them: the error that the value inherits.

A *frame* is the code of one module call that runs between the calls of its children; frames are numbered by call.
A frame computes a value from the inputs of the call, the outputs of the children that ran earlier, and the parameters
of the module. Gradients flow the other way, through every frame that can use the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ort_zero.statistics.compare.align import INPUT, INSPECT, OUTPUT, Pairs
from ort_zero.statistics.records import Phase

_SINGLE_PARAMETERS = 3
"""Maximum number of parameters of a module that runs a single operator."""


class Value(NamedTuple):
    """One pair of the forward phase."""

    pair: int
    reference: int
    """The first pair with the same tensor."""
    frame: int
    """The frame whose code computed the value; -1 for the model's inputs."""
    readers: tuple[int, ...]
    """The frames that can read the value from here on."""
    user: int
    """The frame that can use the tensor here: its gradient flows through the frame."""
    is_new: bool
    """The frame computed the tensor here: an input of a child, or an output."""
    is_further: bool
    """A new output of a call after the first output, such as attention's weights: values that the call computed before
    the call returned may depend on it."""


class Links(NamedTuple):
    """Pairs and frames that belong together: two arrays of one length."""

    pair: np.ndarray
    frame: np.ndarray

    @classmethod
    def of(cls, links: list[tuple[int, int]]) -> Links:
        """Return the links of a list of (pair, frame)."""
        return cls(*np.array(links, np.int64).reshape(-1, 2).T)

    def largest_of_frames(self, count: int, values: np.ndarray) -> np.ndarray:
        """Return for each of `count` frames the largest of `values`, a number for each pair; at least 0."""
        largest = np.zeros(count)
        np.maximum.at(largest, self.frame, values[self.pair])
        return largest


@dataclass(frozen=True, slots=True, eq=False)
class Dataflow:
    """The inputs of each value of a step."""

    pairs: Pairs
    frames: int
    """Number of frames in the step."""
    values: list[Value]
    """The pairs of the forward phase, in the order of time."""
    forward: np.ndarray
    """The numbers of these pairs."""
    frame: np.ndarray
    """For each pair of the forward phase, the frame whose code computed it; -1 for the model's inputs."""
    readable: Links
    """The values that a frame can read: its inputs, its children's outputs, values that it computed."""
    inputs: Links
    """The inputs of calls."""
    computed: Links
    """The new values that a frame computed."""
    used: Links
    """The tensors in each frame through which their gradients flow."""
    returned: np.ndarray
    """The pairs that the model returns; they are used outside of the model, where nothing is recorded."""
    owners: Links
    """Parameters and their gradients, in each frame that uses the parameter."""
    compound: np.ndarray
    """True for each frame that runs several operators: it calls children, or has more parameters than one operator."""

    def inner(self) -> np.ndarray:
        """Return the pairs of the forward phase that a frame computed."""
        return self.forward[self.frame[self.forward] >= 0]

    def with_gradient(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of the forward phase that have a gradient, and the pairs of their gradients."""
        gradients = self.pairs.gradient[self.forward]
        return self.forward[gradients >= 0], gradients[gradients >= 0]

    def largest_readable(self, values: np.ndarray) -> np.ndarray:
        """Return for each frame the largest of `values`, a number for each pair, over all tensors that it can read."""
        return self.readable.largest_of_frames(self.frames, values[self.pairs.reference])

    def largest_around(self, of_frames: np.ndarray) -> np.ndarray:
        """Return for each pair the largest of `of_frames`, a number for each frame, over the frames that can use it."""
        largest = np.zeros(len(self.pairs))
        np.maximum.at(largest, self.used.pair, of_frames[self.used.frame])
        return largest

    def largest_gradient(self, of_gradients: np.ndarray) -> np.ndarray:
        """Return for each frame the largest number of the gradients that flow into its backward.

        Gradients flow in at the values that the frame computed or returned; `of_gradients` has a number for the
        gradient of each pair.
        """
        largest = self.computed.largest_of_frames(self.frames, of_gradients)
        outputs = self.forward[self.pairs.kind[self.forward] == OUTPUT]
        np.maximum.at(largest, self.frame[outputs], of_gradients[self.pairs.reference[outputs]])
        return largest

    def owners_of_gradients(self) -> Links:
        """Return the frames that use each parameter, with the pairs of the parameters' gradients."""
        at = self.pairs.phase[self.owners.pair] == Phase.PARAMETER_GRADIENT
        return Links(self.owners.pair[at], self.owners.frame[at])


def dataflow_of(pairs: Pairs) -> Dataflow:
    """Find the inputs of each value of a step."""
    forward = np.flatnonzero(pairs.phase == Phase.FORWARD)
    frame_of_call = _frames(pairs, forward)
    values = _values(pairs, forward, frame_of_call)
    frame = np.full(len(pairs), -1, np.int64)
    frame[forward] = [value.frame for value in values]
    new = [value for value in values if value.is_new]
    frames = 1 + max(frame_of_call.values(), default=-1)
    owners = _owners(pairs, frame_of_call)
    returned = {v.reference for v in values if pairs.kind[v.pair] == OUTPUT and len(v.readers) == 1}
    return Dataflow(
        pairs=pairs,
        frames=frames,
        values=values,
        forward=forward,
        frame=frame,
        readable=Links.of([(value.pair, frame) for value in values for frame in value.readers]),
        inputs=Links.of([(value.pair, value.readers[0]) for value in values if pairs.kind[value.pair] == INPUT]),
        computed=Links.of([(value.pair, value.frame) for value in new]),
        used=Links.of([(value.reference, value.user) for value in values]),
        returned=np.array(sorted(returned), np.int64),
        owners=owners,
        compound=_compound(pairs, frames, frame_of_call, owners),
    )


def _compound(pairs: Pairs, frames: int, frame_of_call: dict[int, int], owners: Links) -> np.ndarray:
    table = pairs.a.layout.table
    callers = set(table.caller[table.phase == Phase.FORWARD].tolist())
    parameters = owners.frame[pairs.phase[owners.pair] == Phase.PARAMETER]
    compound = np.bincount(parameters, minlength=frames) > _SINGLE_PARAMETERS
    compound[[frame_of_call[call] for call in callers if call in frame_of_call]] = True
    return compound


def _values(pairs: Pairs, forward: np.ndarray, frame_of_call: dict[int, int]) -> list[Value]:
    table = pairs.a.layout.table
    values = []
    with_output: set[int] = set()
    for pair in forward.tolist():
        row = pairs.a.rows[pair]
        call, kind, is_new = int(table.call[row]), pairs.kind[pair], bool(pairs.new_value[pair])
        inside, outside = frame_of_call[call], frame_of_call.get(int(table.caller[row]), -1)
        frame = outside if kind == INPUT else inside
        is_passed = kind == INPUT and is_new and outside >= 0
        leaves = kind == OUTPUT and outside >= 0
        values.append(
            Value(
                pair=pair,
                reference=int(pairs.reference[pair]),
                frame=frame,
                readers=(inside, outside) if leaves or is_passed else (inside,),
                user=outside if leaves else inside,
                is_new=is_new and frame >= 0,
                is_further=kind == OUTPUT and is_new and call in with_output,
            )
        )
        if kind == OUTPUT:
            with_output.add(call)
    return values


def _frames(pairs: Pairs, forward: np.ndarray) -> dict[int, int]:
    """Return the number of the frame of each call; frames are numbered from 0.

    A call whose inputs are not in both runs shares its caller's frame: a wrapper of one run alone, or a module that
    reads tensors from an object.
    """
    table = pairs.a.layout.table
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    caller = dict(zip(table.call[rows].tolist(), table.caller[rows].tolist()))
    taking = pairs.a.rows[forward]
    with_inputs = set(table.call[taking[pairs.a.layout.kind[taking] == INPUT]].tolist())
    frame_of_call: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for call in sorted(caller):
        top = call
        while top not in with_inputs and caller.get(top, -1) >= 0:
            top = caller[top]
        frame_of_call[call] = numbers.setdefault(top, len(numbers))
    return frame_of_call


def _owners(pairs: Pairs, frame_of_call: dict[int, int]) -> Links:
    """Return the frames that use each parameter: the calls of its module, else of the nearest enclosing module."""
    table = pairs.a.layout.table
    frames: dict[str, set[int]] = {}
    for row in np.flatnonzero(table.phase == Phase.FORWARD).tolist():
        frames.setdefault(table.module[row], set()).add(frame_of_call[int(table.call[row])])
    links = []
    for number in np.flatnonzero(pairs.kind > INSPECT).tolist():
        module = table.module[pairs.a.rows[number]]
        while module and module not in frames:
            module = module.rpartition(".")[0]
        links += [(number, frame) for frame in sorted(frames.get(module, ()))]
    return Links.of(links)


def inherited_errors(dataflow: Dataflow, errors: np.ndarray, usable: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return for each pair the largest error among the inputs of its computation.

    `errors` and `usable` (the pair was compared) have a value for each pair, `parameters` an error for each frame.
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
    later, earlier = ([0.0] * dataflow.frames for _ in range(2))
    for value in reversed(dataflow.values):
        inherited[value.reference] = max(inherited[value.reference], later[value.user], in_frames[value.user])
        if value.is_new:
            later[value.frame] = max(later[value.frame], gradients[value.pair])
    for value in dataflow.values:
        if value.is_further:
            inherited[value.pair] = max(inherited[value.pair], earlier[value.frame])
        elif value.is_new:
            earlier[value.frame] = max(earlier[value.frame], gradients[value.pair])
    return np.array(inherited)
