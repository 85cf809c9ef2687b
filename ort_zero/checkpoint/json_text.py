"""Reads JSON that may come from a stranger: a text that Python's parser cannot hold is a ValueError like any other."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested more deeply than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
