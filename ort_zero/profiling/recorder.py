"""Measure the steps of one model in a script that ``ort-zero profile`` runs, then end the script.

A step lasts from one training call of the model to its next call. The first steps warm up. The requested number of
steps then runs under torch's and ONNX Runtime's profilers, and the same number again is timed without profilers.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ort_zero.backends.interface import NodeProfiles
from ort_zero.compat.torch_profiler import OperatorProfiler
from ort_zero.profiling.breakdown import NodeRun, Span, divide
from ort_zero.profiling.exchange import DONE, FAILED, ORT, PROFILED, WARM, ProfileRequest, RankProfile, session_prefix
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


class ProfileEndedError(SystemExit):
    """The end of a script after the last measured step: ``finally`` blocks run, handlers of ``Exception`` do not."""


class Recorder:
    """The measurement of the first model that trains in the script.

    Args:
        request: the request of ``ort-zero profile``.
        node_profiles: starts ONNX Runtime's profiler, which writes files whose paths begin with the argument.
    """

    def __init__(self, request: ProfileRequest, node_profiles: Callable[[str], NodeProfiles]):
        self.request = request
        self._result = RankProfile(request.backend)
        self._owner: object | None = None
        self._calls = 0
        """Number of training calls that have begun."""
        self._step: Any = None
        """The range of the running step; None between steps."""
        self._began = 0.0
        self._profiler: OperatorProfiler | None = None
        self._nodes = node_profiles(session_prefix(request.report)) if request.backend == ORT else None
        self.graph_recorder = self._nodes.recorder(self._graph_built) if self._nodes is not None else None
        """The function that the model in ONNX Runtime calls with each new graph; None where PyTorch is measured."""
        self._around_backward()

    # -- events of the script ---------------------------------------------------------------------------------------

    def note_model(self, name: str) -> None:
        """Report the class name of the first model that can be measured."""
        if not self._result.model:
            self._result.model = name
            self._result.write(self.request.report)

    def _graph_built(self, nodes: int, python_ops: int, training: bool) -> int:
        """Record the size of a new graph, and return the number of profiled steps that have begun."""
        if self._profiler is not None:
            self._result.graphs_built += 1
        if training:
            self._result.nodes, self._result.python_ops = nodes, python_ops
        return max(0, self._calls - self.request.warmup)

    def call(self, owner: object, training: bool) -> None:
        """End the running step and begin the next one, directly before a call of a model.

        Args:
            owner: the model, engine or runtime that is called; the first owner of a training call is measured.
            training: whether the call computes gradients.

        Raises:
            ProfileEndedError: all steps are measured.
        """
        if self._owner is None and training:
            self._owner = owner
        if self._owner is not owner:
            return
        self._end_step()
        if self._result.state == DONE:
            raise ProfileEndedError(0)
        if not training:
            return
        self._next_phase()
        self._calls += 1
        if self._calls > self.request.warmup and self._nodes is not None:
            self._nodes.begin_step()
        self._step = named_range(named_ranges.STEP)
        self._step.__enter__()
        self._began = time.perf_counter()

    def failed(self, error: BaseException) -> None:
        """Report an error, which the command then prints."""
        if self._result.state != DONE:
            self._result.state, self._result.error = FAILED, f"{error}"
            self._result.write(self.request.report)

    # -- phases -----------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Record the time of the running step, if any, and end it."""
        if self._step is None:
            return
        seconds = time.perf_counter() - self._began
        self._step.__exit__(None, None, None)
        self._step = None
        warmup, steps = self.request.warmup, self.request.steps
        if warmup < self._calls <= warmup + steps:
            self._result.profiled_seconds.append(seconds)
        elif self._calls > warmup + steps:
            self._result.timed_seconds.append(seconds)
        if self._calls == warmup + steps:
            self._read_profiles()
        elif self._calls >= warmup + 2 * steps:
            self._finish()

    def _next_phase(self) -> None:
        """Start the profilers if the next call is the first after the warmup."""
        if self._calls == self.request.warmup and self._profiler is None:
            self._result.state = WARM
            self._result.write(self.request.report)
            self._profiler = OperatorProfiler()
            try:
                self._profiler.start()
            except RuntimeError as error:
                self.failed(RuntimeError(f"torch's profiler is at work already, in the script itself: {error}"))
                raise ProfileEndedError(1) from None
            named_ranges.activate(True)

    def _read_profiles(self) -> None:
        """Stop the profilers, and divide the time of the profiled steps among their parts."""
        assert self._profiler is not None
        named_ranges.activate(False)
        if self._nodes is not None:
            self._nodes.end()
        self._profiler.stop()
        steps = self._profiler.trees(named_ranges.PREFIX + named_ranges.STEP, Span)
        # the faster half: other processes make steps slower, never faster
        faster = sorted(range(len(steps)), key=lambda i: steps[i].seconds)[: (len(steps) + 1) // 2]
        nodes = [NodeRun(*node) for node in self._nodes.nodes(faster)] if self._nodes is not None else []
        self._result.parts = divide([steps[i] for i in faster], nodes)
        self._result.state = PROFILED
        self._result.write(self.request.report)
        atexit.register(self._finish)  # the script may end before all steps without profilers have run

    def _finish(self) -> None:
        if self._result.state == PROFILED:
            self._result.state = DONE
            self._result.write(self.request.report)

    # -- ranges -----------------------------------------------------------------------------------------------------

    def _around_backward(self) -> None:
        """Replace ``torch.autograd.backward`` by a function whose calls are recorded as ranges."""
        torch.autograd.backward = in_range(named_ranges.BACKWARD, torch.autograd.backward)


def in_range(name: str, function: Callable) -> Callable:
    """Return the function with its calls recorded as ranges of a name."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with named_range(name):
            return function(*args, **kwargs)

    return recorded
