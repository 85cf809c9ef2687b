"""Provide the command line: one file per command, which calls a library function and prints its report."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from typing import Any

from ort_zero.utils.masking import masked

TP_SPLIT_HELP = (
    "how tensor-parallel ranks share tensors, where the checkpoint does not say it itself: PATTERN=DIM, PATTERN=DIM/N "
    "for N fused ones, or PATTERN=replicated, such as '*.o_proj.weight=1'; or a JSON file of such pairs (repeatable)"
)


def options_of(args: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parsed options that are arguments of `function`; those that were not given keep its defaults."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object on stdout; values without a JSON type, such as paths, become text."""
    print(masked(json.dumps(value, indent=2, default=str)))
