"""Provide the command line: one file per command, which calls a library function and prints its report."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

from ort_zero.utils.masking import masked


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object on stdout; values without a JSON type, such as paths, become text."""
    print(masked(json.dumps(value, indent=2, default=str)))


def print_result(args: argparse.Namespace, fields: dict[str, Any], text: str) -> None:
    """Print the text, or with ``--json`` the fields."""
    if args.json:
        print_json(fields)
    else:
        print(text)


def print_report(args: argparse.Namespace, report: Any, text_of: Callable[[Any], str], **more: Any) -> None:
    """Print a report, a dataclass, as text, or with ``--json`` its fields and `more`."""
    print_result(args, {**dataclasses.asdict(report), **more}, text_of(report))


def options_of(args: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a command that a function has parameters for, but for options that were not given."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in known and value is not None}


def add_command(subparsers: argparse._SubParsersAction, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    """Add a command whose description is its help, and return its parser."""
    return subparsers.add_parser(name, help=text, description=text, epilog=epilog)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint that a command reads, and the tag."""
    parser.add_argument("src", metavar="SRC", help="folder or URL of a checkpoint, or of several with a file 'latest'")
    parser.add_argument("--tag", help="which checkpoint of several (default: what 'latest' names)")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands that read checkpoints."""
    text = (
        "how tensor-parallel ranks share tensors, where the checkpoint does not say it itself: PATTERN=DIM, "
        "PATTERN=DIM/N for N fused ones, or PATTERN=replicated, such as '*.o_proj.weight=1'; or a JSON file of such "
        "pairs (repeatable)"
    )
    parser.add_argument("--tp-split", action="append", default=[], metavar="RULE", help=text)
