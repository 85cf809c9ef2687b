"""What ``ort-zero profile`` asks of the script that it runs, and what each of the script's ranks answers."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.errors import ProfileError
from ort_zero.utils.atomic_write import write_json

ORT, TORCH = "ort", "torch"
"""The two backends of a run: the script as it is, and with the section off."""
STARTED, WARM, PROFILED, DONE, FAILED = "started", "warm", "profiled", "done", "failed"
"""The states of a rank, in this order; a failed rank names its error."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What a script is to measure."""

    backend: str
    """:data:`ORT` or :data:`TORCH`."""
    warmup: int
    """Training calls of the model before anything counts: the first ones export, compile and trace."""
    steps: int
    """Training calls that are profiled, and as many again that are only timed."""
    report: str
    """File for the report; rank n appends ``.n``."""

    def write(self, path: Path) -> None:
        """Write the file that the environment names."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(slots=True)
class Part:
    """What one operator, or one other part of a step, takes."""

    kind: str
    """A kind of :mod:`ort_zero.profiling.breakdown`."""
    name: str
    """Operator as its library names it; empty for what is no operator."""
    seconds: float
    """Of the calling thread, in a step."""
    calls: float = 0.0
    """Number of calls in a step."""


@dataclass(slots=True)
class RankProfile:
    """What one rank has measured."""

    backend: str
    state: str = STARTED
    rank: int = 0
    model: str = ""
    parts: list[Part] = field(default_factory=list)
    """Of the faster half of the profiled steps."""
    profiled_seconds: list[float] = field(default_factory=list)
    """Of each step under the profilers, which make it slower."""
    timed_seconds: list[float] = field(default_factory=list)
    """Of each step without them."""
    graphs_built: int = 0
    """Number of graphs that were built while steps were profiled."""
    nodes: int = 0
    """Number of nodes of the training graph."""
    python_ops: int = 0
    """Number of those that Python runs."""
    error: str = ""

    def write(self, report: str) -> None:
        """Write this rank's report, in place of an earlier one."""
        self.rank = env.rank()
        try:
            write_json(Path(f"{report}.{self.rank}"), asdict(self))
        except OSError:
            if self.rank == 0:
                raise
            # on another machine the folder does not exist: the ranks beside the command tell enough


def read_reports(report: str | Path) -> list[RankProfile]:
    """Return what the ranks on this machine have written, rank 0 first."""
    path = Path(report)
    found = []
    for file in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # of a rank that was killed while it wrote
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            parts = [Part(**part) for part in content.pop("parts")]
            found.append(RankProfile(**content, parts=parts))
    return sorted(found, key=lambda one: one.rank)


def read_request(path: Path) -> ProfileRequest:
    """Return what the command wants of this process.

    Raises:
        ProfileError: the file that the environment names cannot be read.
    """
    try:
        return ProfileRequest(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(f"{env.PROFILE}={path} cannot be read, unset it: {error}") from None


def session_prefix(report: str) -> str:
    """Return how the files begin into which sessions of ONNX Runtime write their profiles."""
    folder = Path(report).parent
    return str((folder if folder.is_dir() else Path(tempfile.mkdtemp())) / f"session-{env.rank()}")
