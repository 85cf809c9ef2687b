"""Time whole units, compiled and in PyTorch by turns, and have the faster form run them.

The times of segments leave out what surrounds them: Dynamo's guards, AOTAutograd's code, calls from Python between
large products. They also leave out what a unit's own forward takes more than the form in PyTorch of its segments.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ort_zero.compat.deepspeed import full_shape
from ort_zero.compat.torch_compile import tree_leaves
from ort_zero.compat.torch_modules import parameters_of
from ort_zero.units.placement.agreement import Agreement, Runner

_RUNS = 12
"""Number of timed forwards and backwards in each form; the fastest counts, which noise disturbs least."""
_MAX_CALLS = 8 * _RUNS
"""Largest number of timed calls of a unit. The unit then stays compiled, since too few of the calls had a backward."""


class UnitTrial:
    """The times of equal units, and the form that runs them.

    Args:
        key: name of the units' content, the same on all ranks and in all processes.
        slowdown: units stay compiled while they take at most this multiple of their time in PyTorch.
    """

    def __init__(
        self, key: str, agreement: Agreement, clock: Callable[[], float] = time.perf_counter, slowdown: float = 1.0
    ):
        self._key = key
        self._agreement = agreement
        self._clock, self._slowdown = clock, slowdown
        self._calls = 0
        self._times: dict[Runner, list[float]] = {runner: [] for runner in Runner}
        decided = agreement.placement(key)
        self.runner: Runner | None = decided[0] if decided is not None else None
        """The decision: ``ONNXRUNTIME`` runs units compiled, ``TORCH`` by their own forwards; None until it is made."""
        self._gain = decided[1] if decided is not None else None

    @property
    def reason(self) -> str:
        """Why PyTorch runs the units."""
        return f"a forward and a backward take {-1e3 * (self._gain or 0):.2f} ms less than compiled"

    def run(
        self, compiled: Callable[..., Any], original: Callable[..., Any], unit: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, bool]:
        """Call a unit and time the call; calls run compiled and in plain PyTorch by turns.

        Returns:
            The unit's results; True if `compiled` ran, False if `original` did.
        """
        # by turns, and the other way round after some calls: a layer has each form in turn, however many layers
        in_torch = (self._calls + self._calls // 8) % 2 == 1
        self._calls += 1
        begin = self._clock()
        results = (original if in_torch else compiled)(unit, *args, **kwargs)
        self._watch(Runner.TORCH if in_torch else Runner.ONNXRUNTIME, self._clock() - begin, (args, kwargs), results)
        if self._calls >= _MAX_CALLS and self.runner is None:
            self.runner = Runner.ONNXRUNTIME
        return results, not in_torch

    def _watch(self, runner: Runner, seconds: float, inputs: Any, results: Any) -> None:
        """Register autograd hooks that time the backward of a call, and add it to the seconds of the forward.

        It begins at the first result's gradient, and ends when an input has its gradient. The unit stays compiled if no
        input takes one, and on a GPU, which works on after a call has returned.
        """
        made = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
        read = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not made or not read or read[0].device.type != "cpu":
            self.runner = Runner.ONNXRUNTIME
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
        if self.runner is None and all(len(times) >= _RUNS for times in self._times.values()):
            in_ort, in_torch = self._times[Runner.ONNXRUNTIME], self._times[Runner.TORCH]
            self.runner, self._gain = self._agreement.place_faster(self._key, in_ort, in_torch, self._slowdown)


def trial_key(unit: nn.Module, inputs: Any, graphs: Iterable[str]) -> str:
    """Return the key of a unit's calls, shared by units of equal class, parameters, inputs and names of graphs."""
    parameters = [full_shape(parameter) for parameter in parameters_of(unit)]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    read = [(tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
    facts = (type(unit).__qualname__, unit.training, parameters, read, sorted(graphs))
    return "unit_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
