"""Provide the command line: one file per command, which calls a library function and prints its report."""

from __future__ import annotations

import json
from typing import Any

from ort_zero.masking import masked

TP_SPLIT_HELP = (
    "how tensor-parallel ranks share tensors, where the checkpoint does not say it itself: PATTERN=DIM, PATTERN=DIM/N "
    "for N fused ones, or PATTERN=replicated, such as '*.o_proj.weight=1'; or a JSON file of such pairs (repeatable)"
)


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object on stdout; values without a JSON type, such as paths, become text."""
    print(masked(json.dumps(value, indent=2, default=str)))
