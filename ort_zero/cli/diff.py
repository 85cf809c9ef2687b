"""Run ``ort-zero diff``: list the tensors in which two checkpoints or models differ, and by how much."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from ort_zero.cli import add_command, add_source_options, options_of, print_report
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.sizes import size_in
from ort_zero.utils.tables import aligned

if TYPE_CHECKING:
    from ort_zero.checkpoint.inspection.differences import DiffReport, TensorDifference

_EPILOG = """\
Weights are compared in the most precise dtype that is stored (fp32 master weights if there are any); optimizer state
if both contain any. Exit status: 0 = the same; 1 = different; 2 = one of them cannot be read.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "say in which tensors two checkpoints or models differ, and by how much"
    parser = add_command(subparsers, "diff", text, _EPILOG)
    kinds = "a checkpoint of any format, a folder of checkpoints or safetensors files, or a safetensors file"
    parser.add_argument("a", metavar="A", help=kinds)
    parser.add_argument("b", metavar="B", help="as A")
    parser.add_argument("--tag-a", metavar="TAG", help="which checkpoint of several in A")
    parser.add_argument("--tag-b", metavar="TAG", help="which checkpoint of several in B")
    parser.add_argument("--what", choices=("weights", "weights+optimizer"), help="default: all that both contain")
    parser.add_argument("--atol", type=_tolerance, default=0.0, help="values this close are the same (default: 0)")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, help="as --atol, relative to the value in B")
    add_source_options(parser)
    return parser


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if there is a difference, else 0."""
    from ort_zero.checkpoint.inspection.differences import diff

    try:
        report = diff(**options_of(args, diff))
    except CorruptCheckpointError as error:
        raise CheckpointError(str(error)) from error  # status 1 would say that there is a difference
    print_report(args, report, text_of, same=report.same)
    return 0 if report.same else 1


def text_of(report: DiffReport) -> str:
    """Return one line per tensor that differs, per tensor of only one side, and per note, and a closing line."""
    lines = [f"A: {report.a} ({report.format_a})", f"B: {report.b} ({report.format_b})"]
    if report.different:
        rows = [("differs", "shape", "dtype", "elements", "max abs", "max rel")]
        lines += aligned([*rows, *map(_row, report.different)], right=(3, 4, 5))
    lines += [f"only in A: {name}" for name in report.only_a] + [f"only in B: {name}" for name in report.only_b]
    lines += [f"note: {text}" for text in report.notes]
    read = f"{size_in(report.bytes, 'GB', 3)} in {report.seconds:.1f} s"
    if report.same:
        lines.append(f"same: {report.compared} tensors, {read}")
    else:
        alone = len(report.only_a) + len(report.only_b)
        counts = f"{len(report.different)} of {report.compared} tensors differ, {alone} are in one only"
        lines.append(f"different: {counts}, {read}")
    return "\n".join(lines)


def _row(difference: TensorDifference) -> tuple[str, ...]:
    shape = " / ".join(dict.fromkeys((str(list(difference.shape_a)), str(list(difference.shape_b)))))
    dtype = " / ".join(dict.fromkeys((difference.dtype_a, difference.dtype_b)))
    if difference.different is None:
        return (difference.name, shape, dtype, "-", "-", "-")
    counts = f"{difference.different} of {difference.elements}"
    return (difference.name, shape, dtype, counts, f"{difference.max_absolute:.3g}", f"{difference.max_relative:.3g}")
