"""Run ``ort-zero ls``: list the checkpoints in a folder of runs, and tell which are whole."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ort_zero.cli import add_command, add_source_options, options_of, print_result
from ort_zero.utils.sizes import decimal_size
from ort_zero.utils.tables import aligned

if TYPE_CHECKING:
    from ort_zero.checkpoint.inspection.listing import ListedCheckpoint

_EPILOG = """\
"whole" means: all files exist, have their sizes, and belong together. ort-zero verify also checks their bytes.
A star marks the checkpoint that the file 'latest' names. Exit status: 0 = listed; 2 = there is no checkpoint.
"""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "list the checkpoints in a folder of runs, ours, DeepSpeed's and torch's, and say which are whole"
    parser = add_command(subparsers, "ls", text, _EPILOG)
    parser.add_argument("src", metavar="SRC", help="folder or URL of runs, of one run, of checkpoints, or of one")
    add_source_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the list and return 0."""
    from ort_zero.checkpoint.inspection.listing import list_checkpoints

    checkpoints = list_checkpoints(args.src, **options_of(args, list_checkpoints))
    plain = {"checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in checkpoints]}
    print_result(args, plain, text_of(checkpoints))
    return 0


def text_of(checkpoints: Sequence[ListedCheckpoint]) -> str:
    """Return a table with one line per checkpoint."""
    rows: list[tuple[str, ...]] = [("tag", "format", "step", "ZeRO", "ranks", "size", "age", "whole")]
    for checkpoint in checkpoints:
        whole = {True: "yes", False: "no", None: "unknown"}[checkpoint.whole]
        reason = f": {checkpoint.reason}".partition("\n")[0] if checkpoint.reason else ""
        if checkpoint.left_out:
            reason += f"; without {len(checkpoint.left_out)} frozen parameters"
        if checkpoint.partial_bytes:
            reason += f"; beside it {decimal_size(checkpoint.partial_bytes)} of an interrupted save"
        stage = None if checkpoint.format == "dcp" else checkpoint.zero_stage
        numbers = (checkpoint.step, stage, checkpoint.world_size)
        cells = ("-" if number is None else str(number) for number in numbers)
        tag, age = f"{checkpoint.tag}{' *' if checkpoint.latest else ''}", checkpoint.age
        told = decimal_size(checkpoint.bytes), "-" if age is None else age_text(age), f"{whole}{reason}"
        rows.append((tag, checkpoint.format or "-", *cells, *told))
    return "\n".join(aligned(rows, right=range(2, 7)))


def age_text(seconds: float) -> str:
    """Return a time span in its largest unit: ``"3 d"``, ``"5 h"``, ``"12 min"``, ``"40 s"``."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
