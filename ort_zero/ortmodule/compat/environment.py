"""The environment variables of the process, looked up fast: the same object for the same value."""

from __future__ import annotations

import os
from types import CodeType
from typing import Any

LOOKUP: CodeType = type(os.environ).__getitem__.__code__
"""Code that runs when a variable is looked up, however the program does that; its parameter ``key`` is the name."""


class Environment:
    """Looks up environment variables as items: their bytes, or `missing`.

    Args:
        missing: the value of a variable that is not set.
    """

    def __init__(self, missing: Any):
        self._missing = missing

    def __getitem__(self, name: str) -> Any:
        return os.environ._data.get(os.environ.encodekey(name), self._missing)  # type: ignore[attr-defined]
