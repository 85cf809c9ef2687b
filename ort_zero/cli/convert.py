"""Run ``ort-zero convert``: write a checkpoint in another format, for another world size or ZeRO stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ort_zero.checkpoint.files.dtypes import CHOICES
from ort_zero.cli import add_command, add_source, add_source_options
from ort_zero.cli.ranks import SHARED_WORK, on_launched_ranks
from ort_zero.utils.sizes import decimal_size, duration

if TYPE_CHECKING:
    from ort_zero.checkpoint.conversions.converting import ConvertReport


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "write a checkpoint, ours, DeepSpeed's or torch's, in any of these formats, also at another world size"
    parser = add_command(subparsers, "convert", text, SHARED_WORK.format(command="convert"))
    add_source(parser)
    parser.add_argument("dst", metavar="DST", help="folder or URL for checkpoints; DST/TAG is written")
    text = "format of the new checkpoint (default: ort_zero)"
    formats = ("ort_zero", "deepspeed", "universal", "dcp")
    parser.add_argument("--to", choices=formats, default=formats[0], help=text)
    text = "ranks of the new checkpoint (default: as SRC; dcp has the files of one, for any number)"
    parser.add_argument("--world-size", type=int, metavar="N", help=text)
    text = "ZeRO stage of the new checkpoint (default: as SRC; dcp has none)"
    parser.add_argument("--stage", type=int, metavar="S", help=text)
    parser.add_argument("--dtype", choices=CHOICES, default="keep", help="dtype of the weights (default: keep)")
    text = "DeepSpeed's option, where the run that loads ZeRO-3 sets it (default: DeepSpeed's)"
    parser.add_argument("--sub-group-size", type=int, metavar="N", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint DST/TAG")
    add_source_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert the checkpoint, print the report on rank 0, and return the exit status."""
    from ort_zero.checkpoint.conversions.converting import convert

    return on_launched_ranks(args, convert, text_of)


def text_of(report: ConvertReport) -> str:
    """Return the report as the lines that the command prints."""
    origin = _form(report.source_format, report.source_stage, report.source_world_size)
    form = _form(report.to, report.zero_stage, report.world_size)
    took = duration(report.bytes, report.seconds)
    lines = [f"source: {report.source} ({origin})", f"destination: {report.destination} ({form})"]
    lines.append(f"wrote {len(report.files)} files, {decimal_size(report.bytes)}, {took}, source checked")
    lines += [f"warning: {text}" for text in report.warnings]
    return "\n".join(lines)


def _form(format_name: str, stage: int, world_size: int) -> str:
    zero = "" if format_name == "dcp" else f", ZeRO-{stage}"
    return f"{format_name}{zero}, {world_size} rank{'s' if world_size > 1 else ''}"
