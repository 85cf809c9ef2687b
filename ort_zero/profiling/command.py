"""Run a script twice, in ONNX Runtime and with its ``ort_zero`` section off, and compare the times of a step.

The measuring runs in the script's process: :mod:`ort_zero.profiling.recorder`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.profiling import trace
from ort_zero.profiling.comparison import Comparison, Side
from ort_zero.profiling.exchange import DONE, FAILED, NAMES, ORT, PROFILING, STARTED, TIMING, TORCH, RankProfile
from ort_zero.utils.atomic_write import write_text
from ort_zero.utils.script_process import ScriptError, run_with_request

_DOING = {STARTED: "first steps", PROFILING: "profiling", TIMING: "timing", DONE: "ending"}
"""Name of each phase of a run for the progress bar."""


def profile(
    script: Path,
    command: Sequence[str],
    steps: int,
    warmup: int,
    trace_file: Path | None,
    tell: Callable[[int, int, str], None],
) -> Comparison:
    """Run the script in ONNX Runtime and in PyTorch, and compare the times of a step.

    Args:
        trace_file: file for the trace of all ranks, see :mod:`.trace`; None for no trace.
        tell: called with the number of finished phases, the number of all phases, and the name of the running phase.
    """
    sides, first, total = [], [], 2 * len(_DOING)
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as traces:
        for number, backend in enumerate((ORT, TORCH)):

            def is_done(reports: Sequence[dict[str, Any]], number: int = number, name: str = NAMES[backend]) -> bool:
                state = reports[0]["state"] if reports else STARTED
                if state in _DOING:
                    tell(number * len(_DOING) + list(_DOING).index(state), total, f"{name}: {_DOING[state]}")
                return any(report["state"] == DONE for report in reports)

            is_done(())
            request = {"backend": backend, "warmup": warmup, "steps": steps, "traces": trace_file and traces}
            run = run_with_request(command, env.PROFILE, request, is_done)
            ranks = list(map(RankProfile.of, run.reports))
            finished = [rank for rank in ranks if rank.state == DONE]
            if not finished or finished[0].rank != 0:
                why = _why(script, run.status, ranks, warmup + 2 * steps)
                raise ScriptError(f"in {NAMES[backend]}: {why}", run.tail)
            sides.append(Side.of(finished))
            first.append(finished[0])
        if trace_file is not None:
            write_text(trace_file, trace.merged(Path(traces)))
    tell(total, total, "done")
    ours = first[0]
    return Comparison(script.name, ours.model, steps, sides[0], sides[1], ours.runners, ours.settled)


def _why(script: Path, status: int, ranks: Sequence[RankProfile], steps: int) -> str:
    """Return in one line why rank 0 wrote no complete report."""
    failed = [rank for rank in ranks if rank.state == FAILED]
    if failed:
        return f"{script}: {failed[0].error}"
    if status:
        return f"{script} ended with status {status} before its steps were done"
    if not ranks:
        return (
            f'{script} made nothing that runs in ONNX Runtime: no DeepSpeed engine with an enabled "ort_zero" '
            "section, and no ort_zero.wrap (arguments for the script go behind --)"
        )
    return (
        f"{script} ended before {steps} training steps of {ranks[0].model} (each a call in training mode with its "
        "backward) were done; let it run longer, or ask for fewer with --steps and --warmup"
    )
