"""Find the backends that run models in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_zero.backends.interface import Backend


def load(engine: str = "ortmodule") -> Backend:
    """Return the backend of an engine, "compile" or "ortmodule"; imports neither torch nor onnxruntime."""
    if engine == "compile":
        from ort_zero.compile import backend as compile_backend

        return compile_backend
    from ort_zero.ortmodule import backend

    return backend


def memory_options(path: Path) -> tuple[str, str | int | None]:
    """Return the engine that a DeepSpeed JSON chooses, and its memory budget.

    Raises:
        ConfigError: the file cannot be read, or its section is missing, disabled or wrong.
    """
    from ort_zero import config

    section = config.read_section(path)
    return section.engine(), section.memory.budget
