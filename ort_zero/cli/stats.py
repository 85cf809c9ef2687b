"""Run ``ort-zero stats``: check one run, find the first difference of two, or write them side by side."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING

from ort_zero.cli import print_result
from ort_zero.cli.stats_check import add_check
from ort_zero.cli.stats_run import add_run
from ort_zero.cli.stats_texts import as_json, text_of
from ort_zero.statistics import extra
from ort_zero.statistics.naming import span

if TYPE_CHECKING:
    from ort_zero.statistics.compare.merge import MergeReport

_EPILOG = "The folders of runs are written by StatisticsSubscriber(output_dir=...)."


def add_parser(subparsers: argparse._SubParsersAction) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands and return their parsers."""
    text = "check one run, or compare two, by statistics of activations and gradients"
    parser = subparsers.add_parser("stats", help=text, description=text, epilog=_EPILOG, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    return _add_compare(commands), add_check(commands), add_run(commands), _add_merge(commands)


def _add_compare(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "name the first divergence of two runs: step, rank, direction, module and tensor"
    epilog = "Exit status: 0 = the same; 1 = they differ; 2 = they cannot be compared."
    parser = commands.add_parser("compare", help=text, description=text, epilog=epilog)
    parser.add_argument("a", metavar="A", help="folder of the run that counts as correct")
    parser.add_argument("b", metavar="B", help="folder of the other run")
    parser.add_argument(
        "--rtol",
        type=_tolerance,
        default="auto",
        metavar="auto|X",
        help="relative error that is tolerated (default: auto, from the dtypes' precision)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a report to look at, one file that opens offline")
    parser.set_defaults(command="stats compare", work=_compare)
    return parser


def _add_merge(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "write two runs side by side: a text file for each step and rank"
    parser = commands.add_parser("merge", help=text, description=text)
    parser.add_argument("--pt_dir", required=True, metavar="A", help="folder of the PyTorch run")
    parser.add_argument("--ort_dir", required=True, metavar="B", help="folder of the ONNX Runtime run")
    parser.add_argument("--output_dir", required=True, metavar="C", help="new or empty folder to write into")
    parser.set_defaults(command="stats merge", work=_merge)
    return parser


def _tolerance(text: str) -> str | float:
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of 0 or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status."""
    with extra.required():
        return args.work(args)


def _merge(args: argparse.Namespace) -> int:
    from ort_zero.statistics.compare.merge import merge_activation_summary

    report = merge_activation_summary(args.pt_dir, args.ort_dir, args.output_dir)
    print_result(args, dataclasses.asdict(report), text_of_merge(report))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from ort_zero.statistics.compare.compare_runs import compare

    if args.html:
        from ort_zero.statistics.compare.report import check_target, write_report

        check_target(args.html)
    comparison = compare(args.a, args.b, rtol=args.rtol, progress=not args.json)
    if args.html:
        write_report(comparison, args.html)
    print_result(args, as_json(comparison, args.html), text_of(comparison, args.html))
    return 0 if comparison.verdict.same else 1


def text_of_merge(report: MergeReport) -> str:
    """Return the report of a merge as the lines that the command prints."""
    counted = f"{span(report.steps)} of {len(report.ranks)} ranks, {report.records:,} records"
    written = f"wrote {report.output_dir}: {counted}"
    return "\n".join([*(f"note: {note}" for note in report.notes), written])
