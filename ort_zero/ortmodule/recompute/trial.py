"""Takes part in a trial: some steps of a user's unchanged script with the ``memory`` section that is tried.

The command names a file in the environment. In the script that it starts, an engine takes its ``memory`` part from
that file; the runtime counts the training graph's steps, and each rank writes a report and ends the process when they
are done, before the next call of the model, so that all ranks end at the same step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_zero import env
from ort_zero.config import MemoryConfig, OrtModuleConfig
from ort_zero.errors import MemoryPlanError, OrtZeroError
from ort_zero.utils.atomic_write import write_json

if TYPE_CHECKING:
    import torch

    from ort_zero.ortmodule.recompute.decision import Decision
    from ort_zero.ortmodule.recompute.resident_memory import PeakMeter

STARTED, DONE, FAILED = "started", "done", "failed"


class TrialEndedError(SystemExit):
    """All is known that was to be found out; the script's ``finally`` blocks run, and no handler of an Exception."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What the command wants a script to do."""

    memory: dict[str, Any]
    """Takes the place of the section's ``memory``."""
    steps: int
    """Calls of the training graph with their backward; 0: the graph is made, and not run."""
    report: str
    """File for the report; rank n appends ``.n``."""
    fuse_loss: str | None = None
    """Takes the place of the section's ``ortmodule.fuse_loss``; None leaves that as it is."""

    def write(self, path: Path) -> None:
        """Write the file that the environment names."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(slots=True)
class TrialResult:
    """What one rank has found out, as the command reads it."""

    state: str = STARTED
    rank: int = 0
    model: str = ""
    decision: dict[str, Any] | None = None
    """See :meth:`ort_zero.ortmodule.recompute.decision.Decision.as_dict`; None where nothing was planned."""
    measured_bytes: int | None = None
    """Growth of the process in the first step; None where the system does not tell."""
    step_seconds: list[float] = field(default_factory=list)
    """From one call of the training graph to the next, the first one first."""
    error: str = ""
    error_type: str = ""


def read_results(report: str | Path) -> list[TrialResult]:
    """Return what the ranks on this machine have written, rank 0 first."""
    path = Path(report)
    found = []
    for file in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError, ValueError, TypeError):  # of a rank that was killed while it wrote
            found.append(TrialResult(**json.loads(file.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda result: result.rank)


class Trial:
    """The trial that this process is part of, and whether it has ended.

    Args:
        request: see :class:`TrialRequest`.
    """

    def __init__(self, request: TrialRequest):
        self.request = request
        self.memory = MemoryConfig(**request.memory)
        self.ended = False
        self._owner: TrialMonitor | None = None

    def monitor(self, model: str) -> TrialMonitor:
        """Return what follows the calls of one model."""
        return TrialMonitor(self, model)

    def is_monitored_by(self, monitor: TrialMonitor) -> bool:
        """Return whether `monitor` follows the model that is looked at: the first that trains."""
        if self._owner is None:
            self._owner = monitor
        return self._owner is monitor

    def write(self, result: TrialResult) -> None:
        """Write this rank's report, in place of an earlier one."""
        result.rank = env.rank()
        target = Path(f"{self.request.report}.{result.rank}")
        try:
            write_json(target, asdict(result))
        except OSError:
            if result.rank == 0:
                raise
            # on another machine the folder does not exist: the ranks beside the command tell enough


class TrialMonitor:
    """Follows the calls of one model.

    Args:
        trial: of this process.
        model: name of the model's class.
    """

    def __init__(self, trial: Trial, model: str):
        self._trial = trial
        self._result = TrialResult(model=model)
        self._decision: Decision | None = None
        self._meter: PeakMeter | None = None
        self._began: list[float] = []
        self._steps = 0
        trial.write(self._result)

    def call(self) -> None:
        """Note that the model is about to be called.

        Raises:
            TrialEndedError: what was to be found out is known.
        """
        if self._trial.ended:
            if self._trial.is_monitored_by(self):
                self._report(DONE)  # with the time of the last step
            raise TrialEndedError(0)

    def built(self, training: bool, decision: Decision | None) -> None:
        """Note that a graph is there, and has not run.

        Raises:
            TrialEndedError: it is not to run.
        """
        if not training or not self._trial.is_monitored_by(self):
            return
        self._decision = self._decision or decision
        if not self._trial.request.steps:
            self._trial.ended = True
            self._report(DONE)
            raise TrialEndedError(0)

    def before(self, phase: str, device: torch.device) -> None:
        """Note that the training graph's forward or backward begins."""
        if phase != "forward" or not self._trial.is_monitored_by(self):
            return
        if not self._began and self._decision is None:
            from ort_zero.ortmodule.recompute.resident_memory import PeakMeter

            self._meter = PeakMeter(device)
            self._meter.start()
        self._began.append(time.perf_counter())

    def after(self, phase: str) -> None:
        """Note that the training graph's forward or backward has ended."""
        if phase != "backward" or not self._trial.is_monitored_by(self) or self._trial.ended:
            return
        if not self._steps:
            if self._decision is not None:
                self._result.measured_bytes = self._decision.measured
            elif self._meter is not None and self._meter.started:
                self._result.measured_bytes = self._meter.read()
        self._steps += 1
        if self._steps >= self._trial.request.steps:
            self._trial.ended = True
            self._report(DONE, with_last=False)  # a script may end here

    def failed(self, error: BaseException) -> None:
        """Note an error that the command is to repeat."""
        if isinstance(error, OrtZeroError) and not self._trial.ended:
            self._result.error, self._result.error_type = str(error), type(error).__name__
            self._report(FAILED)

    def _report(self, state: str, with_last: bool = True) -> None:
        marks = [*self._began, time.perf_counter()] if with_last else self._began
        self._result.state = state
        self._result.step_seconds = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        self._result.decision = self._decision.as_dict() if self._decision is not None else None
        self._trial.write(self._result)


_trials: dict[Path, Trial] = {}


def current_trial() -> Trial | None:
    """Return the trial that this process is part of; None outside of ``ort-zero memory plan``.

    Raises:
        MemoryPlanError: the file that the environment names cannot be read.
    """
    path = env.memory_trial_file()
    if path is None:
        return None
    if path not in _trials:
        try:
            _trials[path] = Trial(TrialRequest(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise MemoryPlanError(f"{env.MEMORY_TRIAL}={path} cannot be read, unset it: {error}") from None
    return _trials[path]


def override_section(
    memory: MemoryConfig | None, section: OrtModuleConfig
) -> tuple[MemoryConfig | None, OrtModuleConfig, Mapping[str, Any]]:
    """Return the parts of the section as the command wants them, and what a runtime has to be given besides.

    A model that cannot be exported is an error then: the memory that PyTorch needs is not what the command plans.
    """
    trial = current_trial()
    if trial is None:
        return memory, section, {}
    update = {"fallback": "raise"}
    if trial.request.fuse_loss is not None:
        update["fuse_loss"] = trial.request.fuse_loss
    return trial.memory, section.model_copy(update=update), {"trial": trial}
