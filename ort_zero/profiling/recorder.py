"""Measures the steps of one model in a script that ``ort-zero profile`` runs, and ends the script when it is done.

The training calls of the model are the steps: the time from one to the next call of the model. The first ones warm up;
then torch's and ONNX Runtime's profilers record as many as were asked for, and as many again are only timed.
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
    """All is measured; the script's ``finally`` blocks run, and no handler of an Exception."""


class Recorder:
    """Follows the calls of the model that trains first.

    Args:
        request: what is to be measured.
        node_profiles: has ONNX Runtime record nodes into files that begin with a prefix.
    """

    def __init__(self, request: ProfileRequest, node_profiles: Callable[[str], NodeProfiles]):
        self.request = request
        self._result = RankProfile(request.backend)
        self._owner: object | None = None
        self._calls = 0
        """Number of training calls that have begun."""
        self._step: Any = None
        """The range of the step that runs; None between steps."""
        self._began = 0.0
        self._profiler: OperatorProfiler | None = None
        self._nodes = node_profiles(session_prefix(request.report)) if request.backend == ORT else None
        self.graph_recorder = self._nodes.recorder(self._graph_built) if self._nodes is not None else None
        """What a running model calls with each new graph; None where PyTorch is measured."""
        self._around_backward()

    # -- what happens in the script ---------------------------------------------------------------------------------

    def model_is_there(self, name: str) -> None:
        """Note that a model was made that can be measured."""
        if not self._result.model:
            self._result.model = name
            self._result.write(self.request.report)

    def _graph_built(self, nodes: int, python_ops: int, training: bool) -> int:
        """Note a new graph; return the number of profiled steps that have begun."""
        if self._profiler is not None:
            self._result.graphs_built += 1
        if training:
            self._result.nodes, self._result.python_ops = nodes, python_ops
        return max(0, self._calls - self.request.warmup)

    def call(self, owner: object, training: bool) -> None:
        """Note that a model is about to be called.

        Args:
            owner: the model, or what runs it; the first that trains is measured.
            training: whether the call wants gradients.

        Raises:
            ProfileEndedError: everything is measured.
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
        """Note an error that the command is to repeat."""
        if self._result.state != DONE:
            self._result.state, self._result.error = FAILED, f"{error}"
            self._result.write(self.request.report)

    # -- phases -----------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Note the time of the step that ends here, if one runs."""
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
        """Begin what begins with the call that comes."""
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
        """Divide the profiled steps among their parts; nothing is profiled any more."""
        assert self._profiler is not None
        named_ranges.activate(False)
        if self._nodes is not None:
            self._nodes.end()
        self._profiler.stop()
        steps = self._profiler.trees(named_ranges.PREFIX + named_ranges.STEP, Span)
        # other processes make steps slower, never faster
        faster = sorted(range(len(steps)), key=lambda i: steps[i].seconds)[: (len(steps) + 1) // 2]
        nodes = [NodeRun(*node) for node in self._nodes.nodes(faster)] if self._nodes is not None else []
        self._result.parts = divide([steps[i] for i in faster], nodes)
        self._result.state = PROFILED
        self._result.write(self.request.report)
        atexit.register(self._finish)  # a script may end before the steps without profilers are all done

    def _finish(self) -> None:
        if self._result.state == PROFILED:
            self._result.state = DONE
            self._result.write(self.request.report)

    # -- ranges -----------------------------------------------------------------------------------------------------

    def _around_backward(self) -> None:
        """Name autograd's backward, whoever calls it."""
        torch.autograd.backward = in_range(named_ranges.BACKWARD, torch.autograd.backward)


def in_range(name: str, function: Callable) -> Callable:
    """Return a function whose calls are recorded as a range."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with named_range(name):
            return function(*args, **kwargs)

    return recorded
