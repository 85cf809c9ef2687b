"""Run a script twice, in ONNX Runtime and with its ``ort_zero`` section off, and compare the times of a step.

This module imports neither torch nor onnxruntime: the measuring runs in the script's process, see
:mod:`ort_zero.profiling.recorder`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.errors import ProfileError
from ort_zero.profiling import trace
from ort_zero.profiling.comparison import Comparison, Side
from ort_zero.profiling.exchange import (
    DONE,
    FAILED,
    ORT,
    PROFILING,
    STARTED,
    TIMING,
    TORCH,
    RankProfile,
)
from ort_zero.profiling.trace import NAMES
from ort_zero.utils.output_files import write_output_file
from ort_zero.utils.script_process import ScriptFailure, command_line, require_script, run_with_request

_DOING = {STARTED: "first steps", PROFILING: "profiling", TIMING: "timing", DONE: "ending"}
"""Name of each phase of a run for the progress bar."""


class ProfiledScriptError(ScriptFailure, ProfileError):
    """The error of a script that ended before all its steps were measured."""


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """The script to profile, and the number of steps."""

    script: Path
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    """Words of the command line before the script: ``("deepspeed", "--num_gpus", "2")``."""
    steps: int = 5
    warmup: int = 3
    trace: Path | None = None
    """File for the trace of all ranks, see :mod:`.trace`; None for no trace."""


def profile(task: ProfileTask, tell: Callable[[int, int, str], None] = lambda done, of, what: None) -> Comparison:
    """Run the script in ONNX Runtime and in PyTorch, and compare the times of a step.

    Args:
        task: see :class:`ProfileTask`.
        tell: called with the number of finished phases, the number of all phases, and the name of the running phase.

    Raises:
        ConfigError: the script or the launcher does not exist, or the trace cannot be written.
        ProfiledScriptError: the script failed, trained nothing, or ended too early.
    """
    require_script(task.script, task.launcher)
    reports = {}
    phases = list(_DOING)
    total = 2 * len(phases)
    with tempfile.TemporaryDirectory(prefix="ort_zero-") as traces:
        for number, backend in enumerate((ORT, TORCH)):

            def progress(state: str, before: int = number * len(phases), backend: str = backend) -> None:
                if state in phases:
                    tell(before + phases.index(state), total, f"{NAMES[backend]}: {_DOING[state]}")

            progress(STARTED)
            reports[backend] = _run(task, backend, traces if task.trace is not None else None, progress)
        if task.trace is not None:
            write_output_file(task.trace, trace.merged(Path(traces)))
    tell(total, total, "done")
    ours, theirs = reports[ORT], reports[TORCH]
    return Comparison(task.script.name, ours[0].model, task.steps, Side.of(ours), Side.of(theirs))


def _run(task: ProfileTask, backend: str, traces: str | None, progress: Callable[[str], None]) -> list[RankProfile]:
    """Run the script in one backend, and return the profiles of its ranks."""

    def is_done(reports: Sequence[dict[str, Any]]) -> bool:
        if reports:
            progress(reports[0]["state"])
        return any(report["state"] == DONE for report in reports)

    command = command_line(task.script, task.arguments, task.launcher)
    request = {"backend": backend, "warmup": task.warmup, "steps": task.steps, "traces": traces}
    run = run_with_request(command, env.PROFILE, request, is_done)
    ranks = list(map(RankProfile.of, run.reports))
    finished = [rank for rank in ranks if rank.state == DONE]
    if not finished or finished[0].rank != 0:
        raise ProfiledScriptError(f"in {NAMES[backend]}: {_why(task, run.status, ranks)}", run.tail)
    return finished


def _why(task: ProfileTask, status: int, ranks: Sequence[RankProfile]) -> str:
    """Return in one line why rank 0 wrote no complete report."""
    failed = [rank for rank in ranks if rank.state == FAILED]
    if failed:
        return f"{task.script}: {failed[0].error}"
    if status:
        return f"{task.script} ended with status {status} before its steps were done"
    if not ranks:
        return (
            f"{task.script} made nothing that runs in ONNX Runtime: no DeepSpeed engine with an enabled \"ort_zero\" "
            "section, and no ort_zero.wrap (arguments for the script go behind --)"
        )  # fmt: skip
    return (
        f"{task.script} ended before {task.warmup + 2 * task.steps} training steps of {ranks[0].model} (each a call in "
        "training mode with its backward) were done; let it run longer, or ask for fewer with --steps and --warmup"
    )
