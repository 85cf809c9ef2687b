"""Distinguishes the user's code from that of libraries."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>\w+)")
_OURS = str(Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def is_foreign(file: str) -> bool:
    """Return True for a file of torch, ORT, DeepSpeed, Python itself or ort_zero."""
    package = _PACKAGES.search(file)
    if package is not None:
        return package["name"] in ("torch", "onnxruntime", "onnx", "deepspeed", "ort_zero")
    return file.startswith((_OURS, _STANDARD, "<frozen"))
