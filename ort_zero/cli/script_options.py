"""What the commands that run a user's script have in common: options, a bar, and what a failed script printed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def positive(text: str) -> int:
    """Return the number of steps that an option asks for.

    Raises:
        argparse.ArgumentTypeError: it is no whole number from 1 on.
    """
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--launcher``."""
    parser.add_argument("--launcher", metavar="WORDS", help='before the script: "deepspeed --num_gpus 2"')


@contextlib.contextmanager
def script_progress(what: str, unit: str, args: argparse.Namespace) -> Iterator[Any]:
    """Show a bar on a terminal while scripts run; the last lines of one that fails are printed to stderr.

    Args:
        what: is being done.
        unit: is counted.
        args: of the command; with ``--json`` there is no bar.
    """
    from ort_zero.utils.progress import bar
    from ort_zero.utils.script_process import ScriptFailure

    shown = bar(None, what, unit, shown=not args.json, delay=0)
    try:
        yield shown
    except ScriptFailure as error:
        shown.close()
        for line in error.tail:
            print(f"  | {line}", file=sys.stderr)
        raise
    finally:
        shown.close()
