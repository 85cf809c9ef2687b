"""Writes the plan that ``ort-zero memory plan`` is to produce."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ort_zero.utils.output_files import write_output_file


def write_plan_file(path: Path, plan: Sequence[str]) -> None:
    """Write a plan in the form that ORT reads, in place of an earlier one.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_output_file(path, json.dumps(list(plan), indent=1) + "\n")
