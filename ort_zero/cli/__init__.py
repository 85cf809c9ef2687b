"""The command line: one file per command, each a thin call of a library function that returns a report."""

from __future__ import annotations

import json
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object on stdout; what JSON has no word for (a path) is written as text."""
    print(json.dumps(value, indent=2, default=str))
