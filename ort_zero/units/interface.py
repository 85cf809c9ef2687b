"""Declare the functions of a backend: run a model, report on the model, and refuse unsupported options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ort_zero import config


class NodeProfiles(Protocol):
    """The profiles of nodes that ONNX Runtime records while ``ort-zero profile`` runs a script."""

    late_sessions: int
    """Number of sessions that were made while steps were profiled."""

    def begin_step(self) -> None:
        """Begin the next profiled step."""

    def end(self) -> None:
        """Stop recording new sessions."""

    def nodes(self, steps: Iterable[int]) -> Iterable[tuple[str, float]]:
        """Yield the operator and the seconds of each node that ran in these profiled steps, numbered from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The facts about a backend that ``ort-zero doctor`` shows."""

    compiler: str | None = None
    """The command of the C++ compiler; None if there is no compiler."""
    built: bool = False
    """Whether the backend's compiled parts exist."""
    directory: Path | None = None
    """Folder of the compiled parts; None while packages are missing whose versions are in the folder's name."""
    problems: tuple[tuple[str, str], ...] = ()
    """Each problem, and the command that solves it."""


class Backend(Protocol):
    """An engine that runs PyTorch models in ONNX Runtime: a Python module with these functions."""

    def import_hooks(self) -> dict[str, Callable[[Any], None]]:
        """Return the functions to call once a module of ONNX Runtime has been imported, by the module's name."""

    def refuse(self, ds_config: Mapping[str, Any]) -> None:
        """Raise ConfigError for a key of a DeepSpeed config that the backend does not support."""

    def run(self, model: Any, section: config.Config, zero: Mapping[str, Any]) -> Any:
        """Replace the forwards of a model's units, and return the ``UnitsModel`` that runs it. All ranks must call.

        Args:
            model: the user's model, before a DeepSpeed engine is made of it.
            section: how the model runs.
            zero: the section ``"zero_optimization"`` of the DeepSpeed config; empty without DeepSpeed.

        Raises:
            ConfigError: a key of the section is wrong, or a file that it names is missing on a rank.
            UnsupportedVersionError: Python, torch or ONNX Runtime is missing or out of range.
            BuildError: compiled parts cannot be built.
        """

    def examine(self) -> Examination:
        """Return which tools and compiled parts of the backend this machine has and lacks; raises no error."""
