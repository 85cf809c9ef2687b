"""Surrounds the runs of a graph's session: counts them, measures memory, and finds the error that a node raised.

:meth:`ort_zero.ortmodule.runtime.runtime.Runtime.observe_runs` installs it on each new graph.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ort_zero.distributed import lone_failures
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.recompute.peak_check import PeakCheck
from ort_zero.ortmodule.recompute.trial import TrialMonitor
from ort_zero.ortmodule.runtime import calls_in_torch
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.zero3.gather_reduce import CollectiveExecutor
from ort_zero.utils.named_ranges import SESSION, named_range


def observe(
    graph: BuiltGraph,
    runs: Counter[str],
    *,
    device: torch.device,
    peak_check: PeakCheck | None = None,
    trial_monitor: TrialMonitor | None = None,
    seconds: dict[str, float] | None = None,
    ran: Callable[[], None] | None = None,
) -> None:
    """Count the completed runs of a graph, and let them raise what a node raised rather than ORT's message about it.

    Args:
        graph: a new one.
        runs: counts completed runs by ``"forward"`` and ``"backward"``.
        device: device of the model.
        peak_check: holds the memory of the first step against the prediction.
        trial_monitor: follows the steps for ``ort-zero memory plan``.
        seconds: is given how long the first run took.
        ran: called after each half of a run, for ``ort-zero profile``.
    """
    executor = graph.executor

    def around(phase: str, run: Callable[[], Any]) -> Any:
        if peak_check is not None:
            peak_check.before(phase)
        if trial_monitor is not None:
            trial_monitor.before(phase, device)
        started = time.perf_counter()
        try:
            with calls_in_torch.expected(), named_range(SESSION):
                result = run()
        except BaseException as error:
            own = _nodes_own_error(executor, error)
            if executor is not None:
                if isinstance(own, Exception) and _amid_collectives(executor, phase):
                    lone_failures.report(own)
                with contextlib.suppress(Exception):
                    executor.drain()
            raise own from None
        runs[phase] += 1
        if seconds is not None:
            seconds.setdefault(f"first {phase}", time.perf_counter() - started)
        if ran is not None:
            ran()
        if peak_check is not None:
            peak_check.after(phase)
        if trial_monitor is not None:
            trial_monitor.after(phase)
        return result

    graph.surround = around
    ort_compat.guard_agent(graph.session.agent, around)


def _nodes_own_error(executor: CollectiveExecutor | None, error: BaseException) -> BaseException:
    """Return the error that a node raised, in place of ORT's message about it."""
    own = torch_fallback.take_failure()
    if executor is not None:
        own, executor.error = executor.error or own, None
    return error if own is None else own


def _amid_collectives(executor: CollectiveExecutor, phase: str) -> bool:
    """Return whether other ranks may be waiting for what this run has not come to."""
    return executor.plan.gathers_weights or phase == "backward"
