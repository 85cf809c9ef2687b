"""Exchange files between ``ort-zero profile`` and the script: what each rank reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ort_zero import env
from ort_zero.runtimes.runner import Runner

ORT, TORCH = "ort", "torch"
"""The two backends: the script unchanged, and the script with its ``ort_zero`` section off."""
NAMES = {ORT: Runner.ONNXRUNTIME.title, TORCH: Runner.TORCH.title}
"""Name of each backend in tables and traces."""
STARTED, PROFILING, TIMING, DONE, FAILED = "started", "profiling", "timing", "done", "failed"
"""The states of a rank, in the order of time; the report of a failed rank has the error's message."""


@dataclass(slots=True)
class Part:
    """The time of one operator, or of one other part of a step."""

    kind: str
    """See :mod:`.breakdown`."""
    name: str
    """Name of the operator in ONNX Runtime or PyTorch; empty for a part that is not an operator."""
    seconds: float
    """Wall time of the calling thread in a step."""
    calls: float = 0.0
    """Mean number of calls in a step."""


@dataclass(slots=True)
class RankProfile:
    """The report of one rank."""

    state: str = STARTED
    rank: int = 0
    model: str = ""
    parts: list[Part] = field(default_factory=list)
    """Mean times of the faster half of the profiled steps."""
    profiled_seconds: float = 0.0
    """Median time of a step under the profilers, which make steps slower."""
    step_seconds: float = 0.0
    """Median time of a step without profilers."""
    error: str = ""
    runners: dict[str, Any] = field(default_factory=dict)
    """What runs the units of each class, as in ``ort_zero.status()``."""
    settled: bool = True
    """Whether that stays so from the measured steps on."""

    @classmethod
    def of(cls, content: dict[str, Any]) -> RankProfile:
        """Return the report that :meth:`write` wrote as JSON."""
        return cls(**{**content, "parts": [Part(**part) for part in content["parts"]]})

    def write(self, state: str) -> None:
        """Write this rank's report in a state, and replace an earlier report."""
        self.state, self.rank = state, env.rank()
        env.answer(env.PROFILE, asdict(self))
