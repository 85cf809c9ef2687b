"""Whether onnxruntime is missing where onnxruntime-training has no wheel, and how an error shows that."""

from __future__ import annotations

import importlib.util
import sys

ORT_IS_MISSING = sys.version_info >= (3, 12) and importlib.util.find_spec("onnxruntime") is None
NO_WHEEL = "onnxruntime-training has no wheel for it"
"""What whoever asks for ONNX Runtime is told on a Python without a wheel of it."""
# the extra that brings onnx is the one that would bring onnxruntime
_SIGNS = (
    NO_WHEEL,
    "onnxruntime is not installed",
    "No module named 'onnx",
    "No package metadata was found for onnxruntime-training",
)


def shows_its_absence(text: str) -> bool:
    """Return whether `text`, an error, says that onnxruntime is missing where it has to be."""
    return ORT_IS_MISSING and any(sign in text for sign in _SIGNS)
