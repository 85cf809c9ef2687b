"""Run ``ort-zero stats check``: a verdict on the statistics of one run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ort_zero.cli import print_result
from ort_zero.utils import tables

if TYPE_CHECKING:
    from ort_zero.statistics.check.checked_run import CheckedRun
    from ort_zero.statistics.check.findings import Finding

_HEAD = ("step", "rank", "kind", "direction", "where", "value")


def add_check(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "check one run: values that are not finite, replicas apart, parameters without updates, modes, data, ties"
    epilog = "Exit status: 0 = healthy, perhaps with hints; 1 = findings; 2 = the run cannot be read."
    parser = commands.add_parser("check", help=text, description=text, epilog=epilog)
    parser.add_argument("run_folder", metavar="RUN", help="folder of the run")
    parser.add_argument("--html", metavar="FILE", help="also write the findings as one HTML file")
    parser.set_defaults(command="stats check", work=_check)
    return parser


def _check(args: argparse.Namespace) -> int:
    from ort_zero.statistics.check.checked_run import check, write_check
    from ort_zero.statistics.compare.report import check_target

    if args.html:
        check_target(args.html)
    checked = check(args.run_folder, progress=not args.json)
    if args.html:
        write_check(checked, args.html)
    fields = {"healthy": not checked.findings, "verdict": checked.verdict, **dataclasses.asdict(checked)}
    print_result(args, {**fields, "html": args.html}, text_of(checked, args.html))
    return 1 if checked.findings else 0


def text_of(checked: CheckedRun, html: str | None = None) -> str:
    """Return a checked run as the lines that the command prints, the first finding first."""
    lines = [checked.verdict]
    if checked.findings:
        lines += ["", *_lines(checked.findings)]
    if checked.hints:
        lines += ["", "may be meant so:", *_lines(checked.hints)]
    lines += [f"note: {note}" for note in checked.notes]
    return "\n".join([*lines, *([f"report: {html}"] if html else [])])


def _lines(findings: Sequence[Finding]) -> list[str]:
    """Return a table of findings, each with what is wrong and what to do in the lines below."""
    rows = [(str(f.step), str(f.rank), f.kind, f.direction, f.place, f.value) for f in findings]
    head, *body = tables.aligned([_HEAD, *rows], right={0, 1})
    return [head, *(line for row, f in zip(body, findings) for line in (row, f"  {f.text}", f"  -> {f.advice}"))]
