"""Run ``ort-zero verify``: check every byte of a checkpoint, and that its files belong together."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ort_zero.cli import add_command, add_source, add_source_options, options_of, print_report
from ort_zero.utils.sizes import duration, size_in
from ort_zero.utils.text import shortened

if TYPE_CHECKING:
    from ort_zero.checkpoint.inspection.verification import VerifyReport

_EPILOG = "Exit status: 0 = no problem; 1 = problems, one line each; 2 = there is no checkpoint."


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "check every byte of a checkpoint, ours, DeepSpeed's or torch's, and name the files that are bad"
    parser = add_command(subparsers, "verify", text, _EPILOG)
    add_source(parser)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="files read at a time (default: 2)")
    add_source_options(parser)
    text = "if nothing is wrong, write checksums of all files beside the checkpoint, for verify and aggregate"
    parser.add_argument("--seal", dest="seal_it", action="store_true", help=text)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if there is a problem, else 0."""
    from ort_zero.checkpoint.inspection.verification import verify

    report = verify(args.src, **options_of(args, verify))
    if args.tag is None and (others := _others(args.src, report.root)):
        note = f"not verified: {shortened(others, 12)} (--tag names the one to verify)"
        report = dataclasses.replace(report, notes=(*report.notes, note))
    print_report(args, report, text_of, ok=report.ok)
    return 0 if report.ok else 1


def _others(src: str, root: str) -> list[str]:
    """Return the names of the checkpoints in a folder, apart from `root`."""
    from ort_zero.checkpoint.files.storage import open_folder
    from ort_zero.checkpoint.finding import checkpoints_below

    return [each.name for each in checkpoints_below(open_folder(src)) if each.folder.path() != root]


def text_of(report: VerifyReport) -> str:
    """Return one line per problem and note, and a closing line."""
    lines = [f"problem: {text}" for text in report.problems]
    lines += [f"note: {text}" for text in report.notes]
    read = f"{report.files} files, {size_in(report.bytes, 'GB', 3)} {duration(report.bytes, report.seconds)}"
    if report.ok:
        lines.append(f"ok: {report.root} ({report.format}, {report.tensors} tensors), {read}")
    else:
        lines.append(f"bad: {report.root} ({report.format}), {len(report.problems)} problem(s), {read}")
    return "\n".join(lines)
