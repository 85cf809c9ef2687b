"""The backend of onnxruntime-training; nothing heavy is imported at module level."""

from __future__ import annotations

from ort_zero.ortmodule.upstream.examination import examine
from ort_zero.ortmodule.upstream.hooks import import_hooks

__all__ = ["examine", "import_hooks"]
