"""Measures the steps of one model in a script that ``ort-zero profile`` runs, and ends the script when it is done.

The training calls of the model are the steps: the time from one to the next call of the model. The first ones warm up;
then torch's and ONNX Runtime's profilers record as many as were asked for, and as many again are only timed.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ort_zero.compat.torch_profiler import OperatorProfiler
from ort_zero.ortmodule.compat.ortmodule import profiles
from ort_zero.profiling.breakdown import NodeRun, Span, divide
from ort_zero.profiling.exchange import DONE, FAILED, ORT, PROFILED, WARM, ProfileRequest, RankProfile, session_prefix
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


class ProfileEndedError(SystemExit):
    """All is measured; the script's ``finally`` blocks run, and no handler of an Exception."""


class _ProfiledSession:
    """A session that records its nodes.

    Args:
        agent: ORTModule's, of the session.
        begun: number of profiled steps that have begun.
    """

    def __init__(self, agent: Any, begun: int):
        self.agent = agent
        self.runs = 0
        """Number of halves of runs, of which the profile has one each."""
        self.marks = [0] * begun
        """That number when each profiled step began."""

    def nodes(self, steps: Iterable[int]) -> Iterator[NodeRun]:
        """Yield the nodes that ran in some of the profiled steps; the recording has ended."""
        runs = profiles.runs_in(profiles.end(self.agent))
        bounds = [*self.marks, self.runs]
        for step in steps:
            for run in runs[bounds[step] : bounds[step + 1]]:
                yield from (NodeRun(*node) for node in run)


class Recorder:
    """Follows the calls of the model that trains first.

    Args:
        request: what is to be measured.
    """

    def __init__(self, request: ProfileRequest):
        self.request = request
        self._result = RankProfile(request.backend)
        self._owner: object | None = None
        self._calls = 0
        """Number of training calls that have begun."""
        self._step: Any = None
        """The range of the step that runs; None between steps."""
        self._began = 0.0
        self._profiler: OperatorProfiler | None = None
        self._sessions: list[_ProfiledSession] = []
        if request.backend == ORT:
            profiles.record_sessions(session_prefix(request.report))
        self._around_backward()

    # -- what happens in the script ---------------------------------------------------------------------------------

    def model_is_there(self, name: str) -> None:
        """Note that a model was made that can be measured."""
        if not self._result.model:
            self._result.model = name
            self._result.write(self.request.report)

    def graph_is_there(self, agent: Any, nodes: int, python_ops: int, training: bool) -> Callable[[], None]:
        """Note a new graph; return what is to be called after each run of its session."""
        begun = max(0, self._calls - self.request.warmup)
        session = _ProfiledSession(agent, begun)
        self._sessions.append(session)
        if self._profiler is not None:
            self._result.graphs_built += 1
        if training:
            self._result.nodes, self._result.python_ops = nodes, python_ops

        def ran() -> None:
            session.runs += 1

        return ran

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
        if self._calls > self.request.warmup:
            for session in self._sessions:
                session.marks.append(session.runs)
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
        profiles.record_sessions(None)
        self._profiler.stop()
        steps = self._profiler.trees(named_ranges.PREFIX + named_ranges.STEP, Span)
        # other processes make steps slower, never faster
        faster = sorted(range(len(steps)), key=lambda i: steps[i].seconds)[: (len(steps) + 1) // 2]
        nodes = [node for session in self._sessions for node in session.nodes(faster)]
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
