"""Surrounds the runs of a graph's session: counts them, measures memory, and finds the error that a node raised.

:meth:`ort_zero.runtime.runtime.Runtime.observe_runs` installs it on each new graph.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ort_zero.compat import ortmodule as ort_compat
from ort_zero.recompute.peak_check import PeakCheck
from ort_zero.recompute.trial import TrialMonitor
from ort_zero.runtime import calls_in_torch
from ort_zero.runtime.built_graph import BuiltGraph
from ort_zero.runtime.operators import torch_fallback
from ort_zero.runtime.zero3.gather_reduce import CollectiveExecutor


def observe(
    graph: BuiltGraph,
    runs: Counter[str],
    *,
    device: torch.device,
    peak_check: PeakCheck | None = None,
    trial_monitor: TrialMonitor | None = None,
) -> None:
    """Count the completed runs of a graph, and let them raise what a node raised rather than ORT's message about it.

    Args:
        graph: a new one.
        runs: counts completed runs by ``"forward"`` and ``"backward"``.
        device: device of the model.
        peak_check: holds the memory of the first step against the prediction.
        trial_monitor: follows the steps for ``ort-zero memory plan``.
    """
    executor = graph.executor

    def around(phase: str, run: Callable[[], Any]) -> Any:
        if peak_check is not None:
            peak_check.before(phase)
        if trial_monitor is not None:
            trial_monitor.before(phase, device)
        try:
            with calls_in_torch.expected():
                result = run()
        except BaseException as error:
            raise _nodes_own_error(executor, error) from None
        runs[phase] += 1
        if peak_check is not None:
            peak_check.after(phase)
        if trial_monitor is not None:
            trial_monitor.after(phase)
        return result

    ort_compat.guard_agent(graph.session.agent, around)


def _nodes_own_error(executor: CollectiveExecutor | None, error: BaseException) -> BaseException:
    """Return the error that a node raised, in place of ORT's message about it; finish what was gathered ahead."""
    own = torch_fallback.take_failure()
    if executor is not None:
        own, executor.error = executor.error or own, None
    if own is None:
        return error
    if executor is None:
        return own
    with contextlib.suppress(Exception):
        executor.drain()
    return own
