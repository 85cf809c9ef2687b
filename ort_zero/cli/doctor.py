"""Run ``ort-zero doctor``: show what works on this machine, and what to fix first for training in ONNX Runtime."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_zero.cli import print_report
from ort_zero.errors import OrtZeroError
from ort_zero.utils.masking import masked, without_folders
from ort_zero.utils.tables import aligned

if TYPE_CHECKING:
    from ort_zero.cli.examinations import machine
    from ort_zero.cli.examinations.ranks import RanksReport

_PATH, _LAST_PART = re.compile(r'"(?:[^"\\]|\\.)*/((?:[^"\\/]|\\.)*)"'), r'".../\1"'
"""A text of a JSON file that has a path, also with spaces, and what is shown of it."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "show versions, compiler, extensions and providers, and the first thing to fix"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    text = "compare versions and files of the ranks that torchrun, deepspeed or mpirun has started"
    parser.add_argument("--ranks", action="store_true", help=text)
    text = "print what a bug report needs, with paths and secrets masked: versions, machine, the section of DS.json"
    parser.add_argument("--report", nargs="?", const="", metavar="DS.json", help=text)
    parser.add_argument("--storage", metavar="DIR", help="with --ranks: folder for checkpoints that all hosts share")
    text = "with --ranks: must be the same on all hosts"
    parser.add_argument("--file", action="append", default=[], metavar="FILE", help=text)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if something must be fixed before models can train, else 0."""
    from ort_zero.cli.examinations import machine

    if args.ranks:
        return _compare_ranks(args)
    if args.storage or args.file:
        raise OrtZeroError("--storage and --file go with --ranks")
    section = _section(args.report) if args.report else None
    report = machine.examine()
    text = text_of if args.report is None else functools.partial(bug_report, section=section)
    print_report(args, report, text, ok=report.ok)
    return 0 if report.ok else 1


def _compare_ranks(args: argparse.Namespace) -> int:
    """Print the differences between ranks on rank 0; return 1 on all ranks if there are any. All ranks must call."""
    from ort_zero.cli.examinations.ranks import compare_ranks
    from ort_zero.distributed import gloo_exit, launched_ranks

    gloo_exit.settle_at_exit()
    ranks = launched_ranks.from_launcher()
    try:
        report = compare_ranks(ranks, args.storage, args.file)
    finally:
        ranks.close()
    if ranks.rank == 0:
        print_report(args, report, _text_of_ranks, ok=report.ok)
    return 0 if report.ok else 1


def _text_of_ranks(report: RanksReport) -> str:
    lines = [f"{report.ranks} ranks on {', '.join(report.hosts)}"]
    lines += [f"same: {name} {value}" for name, value in report.facts.items()]
    return "\n".join(lines + ([f"problem: {text}" for text in report.problems] or ["ready: all ranks see the same"]))


def bug_report(report: machine.Report, section: Any = None) -> str:
    """Return the report as a block to paste into an issue, with the section of a DeepSpeed JSON; paths are masked."""
    environment = {name: "..." if name == "HOME" else value for name, value in report.environment.items()}
    parts = [text_of(dataclasses.replace(report, environment=environment))]
    if section is not None:
        parts.append(f'"ort_zero": {_PATH.sub(_LAST_PART, masked(json.dumps(section, indent=2)))}')
    return f"```\n{masked(without_folders(chr(10).join(parts)))}\n```"


def _section(path: str) -> Any:
    """Return the section of a DeepSpeed JSON as it is written, None without one."""
    from ort_zero import config

    content = config.read_json(Path(path), "the config")
    return content.get(config.SECTION) if isinstance(content, dict) else None


def text_of(report: machine.Report) -> str:
    """Return the report as aligned lines."""
    rows = [("", "", "found", "needed")]
    for v in report.versions:
        state = ("untested" if v.untested else "ok") if v.ok else "FIX"
        rows.append((state, v.name, v.found or "missing", v.needed))
    for name, version in report.optional.items():
        rows.append(("ok" if version else "-", name, version or "missing", "(optional)"))
    lines = aligned(rows)
    lines += ["", *(f"{name:12} {value}" for name, value in report.facts.items())]
    variables = (f"{name}={value}" for name, value in report.environment.items())
    lines += [f"{'' if index else 'environment':12} {text}" for index, text in enumerate(variables)]
    lines.append("")
    if report.problems:
        lines += [f"problem: {problem.what}" for problem in report.problems]
        lines.append(f"fix first: {report.first_fix}")
        if any(v.name == "torch" and v.found is None for v in report.versions):
            lines.append("without torch: aggregate, verify and ls work; diff, convert and loading need torch")
    else:
        lines.append("ready: models can be trained in ONNX Runtime")
    return "\n".join(lines)
