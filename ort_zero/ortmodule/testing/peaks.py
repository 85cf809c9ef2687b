"""Measures the memory of a model's first step, with a recompute plan or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_zero.ortmodule.recompute.resident_memory import PeakMeter
    from ort_zero.ortmodule.runtime.runtime import Runtime


def start_at_first_run(runtime: Runtime, meter: PeakMeter) -> None:
    """Let `meter` start when the model's first graph begins to run: the export before it needs memory of its own.

    Raises:
        RuntimeError: in that run, the system does not let a process put its mark back.
    """
    original = runtime.observe_runs

    def observed(graph: Any) -> None:
        original(graph)
        run = graph.session.agent.run_forward

        def first(*args: Any) -> Any:
            if not meter.started and not meter.start():
                raise RuntimeError("this system does not let a process put the mark of its largest memory back")
            return run(*args)

        graph.session.agent.run_forward = first

    runtime.observe_runs = observed  # type: ignore[method-assign]  # of this one model
