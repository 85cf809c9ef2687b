"""Declare the functions of a backend: run a model, and examine the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ort_zero import config


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

    def run(self, model: Any, section: config.Config, ds_config: Mapping[str, Any]) -> Any:
        """Replace the forwards of a model's units, and return the ``UnitsModel`` that runs it. All ranks must call.

        Args:
            model: the user's model, before a DeepSpeed engine is made of it.
            section: how the model runs.
            ds_config: the DeepSpeed config; empty without DeepSpeed.

        Raises:
            ConfigError: a key of the section or of the DeepSpeed config is wrong, or a file is missing on a rank.
            UnsupportedVersionError: Python, torch or ONNX Runtime is missing or out of range.
            BuildError: compiled parts cannot be built.
        """

    def examine(self) -> Examination:
        """Return which tools and compiled parts of the backend this machine has and lacks; raises no error."""
