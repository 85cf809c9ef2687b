"""Find the backend that runs models in ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_zero.backends.interface import Backend


def load() -> Backend:
    """Return the backend; imports neither torch nor onnxruntime."""
    from ort_zero.ortmodule import backend

    return backend
