"""Measure the steps of one model in a script that ``ort-zero profile`` runs, then end the script.

A step lasts from one training call of the model to its next call. The first steps warm up. The requested number of
steps then runs under torch's and ONNX Runtime's profilers, and the same number again is timed without profilers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ort_zero import env
from ort_zero.profiling import trace
from ort_zero.profiling.breakdown import divide, seconds_of
from ort_zero.profiling.exchange import DONE, FAILED, ORT, PROFILING, STARTED, TIMING, RankProfile
from ort_zero.utils import named_ranges
from ort_zero.utils.named_ranges import named_range


class ProfileEndedError(SystemExit):
    """The end of a script after the last measured step: ``finally`` blocks run, handlers of ``Exception`` do not."""


class Recorder:
    """The measurement, as the command asks for it, of the first model that trains in the script.

    Args:
        node_profiles: has new sessions record their nodes, into files that begin with its argument.
    """

    def __init__(self, asked: Mapping[str, Any], node_profiles: Callable[[str], Any]):
        self.asked = asked
        self._result = RankProfile()
        self._owner: object | None = None
        self._step: Any = None
        """The range of the running step; None between steps."""
        self._began = 0.0
        self._seconds: list[float] = []
        """Time of each step so far."""
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._nodes: Any = None
        self._status: Callable[[], dict[str, Any]] = dict
        if asked["backend"] == ORT:
            folder = Path(asked["report"]).parent
            folder = folder if folder.is_dir() else Path(tempfile.mkdtemp())
            self._nodes = node_profiles(str(folder / f"session-{env.rank()}"))
        torch.autograd.backward = named_range(named_ranges.BACKWARD)(torch.autograd.backward)

    def note_model(self, name: str, status: Callable[[], dict[str, Any]]) -> None:
        """Report the class name of the first model that can be measured; `status` returns its entry in ``status()``."""
        if not self._result.model:
            self._result.model, self._status = name, status
            self._result.write(STARTED)

    def call(self, owner: object, training: bool) -> None:
        """End the running step and begin the next one, before a call of the first owner that trains, or the script."""
        if self._owner is None and training:
            self._owner = owner
        if self._owner is not owner:
            return
        if self._step is not None:
            self._end_step()
        if not training:
            return
        done, warmup = len(self._seconds), self.asked["warmup"]
        if done == warmup and self._result.state != PROFILING:
            self._start_profilers()
        if self._nodes is not None and done >= warmup:
            self._nodes.begin_step()
        self._step = named_range(named_ranges.STEP)
        self._step.__enter__()
        self._began = time.perf_counter()

    def _end_step(self) -> None:
        """Record the time of the running step; after the last step of a phase end the phase."""
        self._seconds.append(time.perf_counter() - self._began)
        self._step.__exit__(None, None, None)
        self._step = None
        done, warmup, steps = len(self._seconds), self.asked["warmup"], self.asked["steps"]
        if done == warmup + steps:
            self._read_profiles()
            self._result.profiled_seconds = statistics.median(self._seconds[warmup:])
            self._result.write(TIMING)
        elif done == warmup + 2 * steps:
            self._result.step_seconds = statistics.median(self._seconds[warmup + steps :])
            status = self._status()
            self._result.runners = status.get("runners", {})
            self._result.settled = status.get("compiled", {}).get("settled", True)
            self._result.write(DONE)
            raise ProfileEndedError(0)

    def _start_profilers(self) -> None:
        self._result.write(PROFILING)
        try:
            self._profiler.start()
        except RuntimeError as error:
            self._result.error = f"torch's profiler is at work already, in the script itself: {error}"
            self._result.write(FAILED)
            raise ProfileEndedError(1) from None
        named_ranges.activate(True)

    def _read_profiles(self) -> None:
        """Stop the profilers, and divide the time of the profiled steps among their parts."""
        named_ranges.activate(False)
        if self._nodes is not None:
            self._nodes.end()
        self._profiler.stop()
        events = self._profiler.events() or ()
        traces = self.asked["traces"]
        if traces is not None and Path(traces).is_dir():
            trace.write_rank(events, self.asked["backend"], Path(traces))
        steps = steps_of(events)
        # the faster half: other processes make steps slower, never faster
        faster = sorted(range(len(steps)), key=lambda i: seconds_of(steps[i]))[: (len(steps) + 1) // 2]
        nodes = self._nodes.nodes(faster) if self._nodes is not None else ()
        self._result.parts = divide([steps[i] for i in faster], nodes)


def steps_of(events: Iterable[Any]) -> list[Any]:
    """Return the steps among the events of torch.profiler, in order."""
    name = named_ranges.PREFIX + named_ranges.STEP
    steps = [event for event in events if event.name == name and not event.is_async]
    return sorted(steps, key=lambda event: event.time_range.start)
