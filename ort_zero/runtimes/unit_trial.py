"""Time the forms of whole units by turns, compiled ones and PyTorch's, and have the fastest run them.

The times of segments leave out what surrounds them: Dynamo's guards, AOTAutograd's code, calls from Python between
large products. They also leave out what a unit's own forward takes more than the form in PyTorch of its segments.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ort_zero.compat.deepspeed import full_shape
from ort_zero.compat.torch_compile import saves_plainly, tensors_in
from ort_zero.compat.torch_modules import modules_of, parameters_of
from ort_zero.runtimes.agreement import Agreement
from ort_zero.runtimes.runner import Runner

_RUNS = 12
"""Number of timed forwards and backwards in each form; the fastest counts, which noise disturbs least."""
_MAX_CALLS = 4 * _RUNS
"""Largest number of timed calls of each form. The unit then stays as it is, since too few of the calls had a backward.
"""
_FIRST_RUNS = 4
"""Number of timed runs of each form after which a form is left out that is slower than the fastest by far."""
_FAR = 1.5
"""Multiple of the fastest form's seconds that is slower by far."""


class UnitTrial:
    """The times of equal units, and the form that runs them.

    Args:
        key: name of the units' content and of the runners, the same on all ranks and in all processes.
        runners: the candidates; units run in the first one until this trial, and stay there if they cannot be timed.
        slowdown: units stay compiled while they take at most this multiple of their time in PyTorch.
    """

    def __init__(
        self,
        key: str,
        agreement: Agreement,
        runners: Sequence[Runner] = (Runner.ONNXRUNTIME, Runner.TORCH),
        clock: Callable[[], float] = time.perf_counter,
        slowdown: float = 1.0,
    ):
        self.key = key
        self._agreement = agreement
        self._first = runners[0]
        self._runners = list(runners)
        """The candidates that have not been left out."""
        self._clock, self._slowdown = clock, slowdown
        self._calls = 0
        self._times: dict[Runner, list[float]] = {runner: [] for runner in runners}
        decided = agreement.placement(key)
        self.runner: Runner | None = decided[0] if decided is not None else None
        """What runs the units from now on, ``TORCH`` by their own forwards; None until that is decided."""
        self.gain = decided[1] if decided is not None else 0.0
        """Seconds that the runner saves, as in :data:`~ort_zero.runtimes.agreement.Decision`; 0 if nobody measured."""
        self._untimed = "its calls cannot be timed"
        """Why the runner was chosen without a time."""
        if self.runner is None and len(self._runners) == 1:
            (self.runner,) = self._runners

    @property
    def reason(self) -> str:
        """Why the runner runs the units."""
        if not self.gain:
            return self._untimed
        than = "compiled" if self.runner is Runner.TORCH else "by the next one"
        return f"a forward and a backward take {1e3 * abs(self.gain):.2f} ms less than {than}"

    @property
    def milliseconds(self) -> dict[str, float]:
        """The shortest forward and backward by each runner that was timed here."""
        return {runner.value: 1e3 * min(seconds) for runner, seconds in self._times.items() if seconds}

    def leave_out(self, runner: Runner, reason: str) -> None:
        """Have a runner run the units no more, on this rank: it fails, or cannot win."""
        before = self.runner
        if runner in self._runners:
            self._runners.remove(runner)
        if self.runner is runner:
            self.runner = Runner.TORCH
        elif self.runner is None and len(self._runners) == 1:
            (self.runner,) = self._runners
        if self.runner is not before:
            self.gain, self._untimed = 0.0, f"{runner.title} is left out: {reason}"

    def turn(self) -> Runner:
        """Return the runner of the next call; each form of a layer has its turn, however many layers there are."""
        count = len(self._runners)
        self._calls += 1
        return self._runners[(self._calls - 1 + (self._calls - 1) // (4 * count)) % count]

    def run(self, runner: Runner, form: Callable[..., Any], unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the form of a unit that :meth:`turn` has chosen, time the call, and return the results."""
        begin = self._clock()
        results = form(unit, *args, **kwargs)
        self._watch(runner, self._clock() - begin, (args, kwargs), results)
        if self.runner is None and self._calls >= _MAX_CALLS * len(self._runners):
            self._stay()
        return results

    def _stay(self) -> None:
        """Leave the units, which cannot be timed, as they are: in PyTorch, if the first candidate has been left out."""
        if self.runner is None:
            self.runner = self._first if self._first in self._runners else Runner.TORCH

    def _watch(self, runner: Runner, seconds: float, inputs: Any, results: Any) -> None:
        """Register autograd hooks that time the backward of a call, and add it to the seconds of the forward.

        It begins at the first result's gradient, and ends when an input has its gradient. The unit stays as it is if no
        input takes one.
        """
        made = [tensor.grad_fn for tensor in tensors_in(results) if tensor.grad_fn]
        read = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not made or not read:
            self._stay()
            return
        begin: list[float] = []

        def begins(_: Any) -> None:
            if not begin:
                begin.append(self._clock())

        def ends(_: Any) -> None:
            if begin:
                self._add(runner, seconds + self._clock() - begin.pop())

        for node in made:
            node.register_prehook(begins)
        read[0].register_hook(ends)

    def _add(self, runner: Runner, seconds: float) -> None:
        self._times[runner].append(seconds)
        if self.runner is not None:
            return
        runs = min(len(self._times[each]) for each in self._runners)
        if runs < _FIRST_RUNS:
            return
        least = {each: min(self._times[each]) for each in self._runners}
        near = [each for each, shortest in least.items() if shortest <= _FAR * min(least.values())]
        if runs >= _RUNS or len(near) == 1:
            times = {each: self._times[each] for each in self._runners}
            self.runner, self.gain = self._agreement.place_fastest(self.key, times, self._slowdown)
        else:
            self._runners = near


def trial_key(unit: nn.Module, inputs: Any, runners: Iterable[Runner], graphs: Iterable[str]) -> str:
    """Return the key of a unit's calls: of equal class, parameters, inputs, candidates and names of graphs."""
    parameters = [full_shape(parameter) for parameter in parameters_of(unit)]
    tensors = tensors_in(inputs)
    read = [(tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
    facts = (type(unit).__qualname__, unit.training, parameters, read, [each.value for each in runners], sorted(graphs))
    return "unit_" + _hash(facts)


def sizes_of(unit: nn.Module) -> tuple[int, Any]:
    """Return the number of elements of a unit's parameters, and their shapes."""
    shapes = tuple(full_shape(parameter) for parameter in parameters_of(unit))
    return sum(map(math.prod, shapes)), shapes


def start_key(unit: nn.Module, inputs: Any, runners: Iterable[Runner]) -> str:
    """Return the key of a unit's calls before it has graphs: of equal code, parameters, inputs and candidates.

    Sizes of inputs count by powers of two, since lengths change from batch to batch.
    """
    modules, parameters = list(modules_of(unit)), parameters_of(unit)
    tensors = tensors_in(inputs)
    read = [(each.dim(), each.numel().bit_length(), each.dtype, each.requires_grad) for each in tensors]
    kinds = sorted({each.device.type for each in tensors})
    facts = (
        repr(unit),
        [getattr(getattr(type(each).forward, "__code__", None), "co_code", None) for each in modules],
        [_plain_values(each.config) for each in modules if hasattr(each, "config")],
        (unit.training, saves_plainly()),
        [(full_shape(parameter), parameter.dtype) for parameter in parameters],
        read,
        [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else kind for kind in kinds],
        [each.value for each in runners],
    )
    return "start_" + _hash(facts)


def _plain_values(config: Any) -> list[tuple[str, Any]]:
    values = getattr(config, "__dict__", {}).items()
    return sorted((name, value) for name, value in values if isinstance(value, (bool, int, float, str)))


def _hash(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
