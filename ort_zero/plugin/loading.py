"""Find the backends that run models in ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_zero.runtimes.interface import Backend


def load(engine: str) -> Backend:
    """Return the backend of an engine, "compile" or "ortmodule"; import neither torch nor onnxruntime."""
    if engine == "compile":
        from ort_zero.compile import backend as compile_backend

        return compile_backend
    from ort_zero.ortmodule import backend

    return backend
