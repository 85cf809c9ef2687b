"""Steps of a user's unchanged script under another ``memory`` section: the seam of ``ort-zero memory plan``.

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

    from ort_zero.recompute.optimizer import Decision
    from ort_zero.recompute.resident_memory import PeakMeter

MADE, DONE, FAILED = "made", "done", "failed"


class EndedError(SystemExit):
    """All is known that was to be found out; the script's ``finally`` blocks run, and no handler of an Exception."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the command wants of a script."""

    memory: dict[str, Any]
    """Takes the place of the section's ``memory``."""
    steps: int
    """Calls of the training graph with their backward; 0: the graph is made, and not run."""
    report: str
    """File for the report; rank n appends ``.n``."""

    def write(self, path: Path) -> None:
        """Write the file that the environment names."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(slots=True)
class Outcome:
    """What one rank found out, as the command reads it."""

    state: str = MADE
    rank: int = 0
    model: str = ""
    decision: dict[str, Any] | None = None
    """See :meth:`ort_zero.recompute.optimizer.Decision.as_dict`; None where nothing was planned."""
    measured_bytes: int | None = None
    """Growth of the process in the first step; None where the system does not tell."""
    step_seconds: list[float] = field(default_factory=list)
    """From one call of the training graph to the next, the first one first."""
    error: str = ""
    error_type: str = ""


def read_outcomes(report: str | Path) -> list[Outcome]:
    """Return what the ranks on this machine have written, rank 0 first."""
    path = Path(report)
    found = []
    for file in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError, ValueError, TypeError):  # of a rank that was killed while it wrote
            found.append(Outcome(**json.loads(file.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda outcome: outcome.rank)


class Session:
    """The command's order in this process, and how far it is carried out.

    Args:
        order: see :class:`Order`.
    """

    def __init__(self, order: Order):
        self.order = order
        self.memory = MemoryConfig(**order.memory)
        self.ended = False
        self._owner: Watch | None = None

    def watch(self, model: str) -> Watch:
        """Return what follows the calls of one model."""
        return Watch(self, model)

    def owned_by(self, watch: Watch) -> bool:
        """Return whether `watch` follows the model that is looked at: the first that trains."""
        if self._owner is None:
            self._owner = watch
        return self._owner is watch

    def write(self, outcome: Outcome) -> None:
        """Write this rank's report, in place of an earlier one."""
        outcome.rank = env.rank()
        target = Path(f"{self.order.report}.{outcome.rank}")
        try:
            write_json(target, asdict(outcome))
        except OSError:
            if outcome.rank == 0:
                raise
            # on another machine the folder does not exist: the ranks beside the command tell enough


class Watch:
    """Follows the calls of one model.

    Args:
        session: of this process.
        model: its name.
    """

    def __init__(self, session: Session, model: str):
        self._session = session
        self._outcome = Outcome(model=model)
        self._decision: Decision | None = None
        self._meter: PeakMeter | None = None
        self._began: list[float] = []
        self._steps = 0
        session.write(self._outcome)

    def call(self) -> None:
        """Note that the model is about to be called.

        Raises:
            EndedError: what was to be found out is known.
        """
        if self._session.ended:
            if self._session.owned_by(self):
                self._report(DONE)  # with the time of the last step
            raise EndedError(0)

    def built(self, training: bool, decision: Decision | None) -> None:
        """Note that a graph is there, and has not run.

        Raises:
            EndedError: it is not to run.
        """
        if not training or not self._session.owned_by(self):
            return
        self._decision = self._decision or decision
        if not self._session.order.steps:
            self._session.ended = True
            self._report(DONE)
            raise EndedError(0)

    def before(self, phase: str, device: torch.device) -> None:
        """Note that the training graph's forward or backward begins."""
        if phase != "forward" or not self._session.owned_by(self):
            return
        if not self._began and self._decision is None:
            from ort_zero.recompute.resident_memory import PeakMeter

            self._meter = PeakMeter(device)
            self._meter.start()
        self._began.append(time.perf_counter())

    def after(self, phase: str) -> None:
        """Note that it has ended."""
        if phase != "backward" or not self._session.owned_by(self) or self._session.ended:
            return
        if not self._steps:
            if self._decision is not None:
                self._outcome.measured_bytes = self._decision.measured
            elif self._meter is not None and self._meter.started:
                self._outcome.measured_bytes = self._meter.read()
        self._steps += 1
        if self._steps >= self._session.order.steps:
            self._session.ended = True
            self._report(DONE, with_last=False)  # a script may end here

    def failed(self, error: BaseException) -> None:
        """Note an error that the command is to repeat."""
        if isinstance(error, OrtZeroError) and not self._session.ended:
            self._outcome.error, self._outcome.error_type = str(error), type(error).__name__
            self._report(FAILED)

    def _report(self, state: str, with_last: bool = True) -> None:
        marks = [*self._began, time.perf_counter()] if with_last else self._began
        self._outcome.state = state
        self._outcome.step_seconds = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        self._outcome.decision = self._decision.as_dict() if self._decision is not None else None
        self._session.write(self._outcome)


_sessions: dict[Path, Session] = {}


def asked() -> Session | None:
    """Return the session that this process is part of; None outside of ``ort-zero memory plan``.

    Raises:
        MemoryPlanError: the file that the environment names cannot be read.
    """
    path = env.memory_session()
    if path is None:
        return None
    if path not in _sessions:
        try:
            _sessions[path] = Session(Order(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise MemoryPlanError(f"{env.MEMORY_SESSION}={path} cannot be read, unset it: {error}") from None
    return _sessions[path]


def in_place_of(
    memory: MemoryConfig | None, section: OrtModuleConfig
) -> tuple[MemoryConfig | None, OrtModuleConfig, Mapping[str, Any]]:
    """Return the parts of the section as the command wants them, and what a runtime has to be given besides.

    A model that cannot be exported is an error then: what PyTorch needs was not asked.
    """
    session = asked()
    if session is None:
        return memory, section, {}
    return session.memory, section.model_copy(update={"fallback": "raise"}), {"session": session}
