"""Share options, a progress bar and the output of failed scripts between commands that run a user's script."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def positive(text: str) -> int:
    """Return the number of steps that an option asks for.

    Raises:
        argparse.ArgumentTypeError: `text` is no whole number from 1 on.
    """
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--launcher``."""
    parser.add_argument("--launcher", metavar="WORDS", help='command before the script: "deepspeed --num_gpus 2"')


@contextlib.contextmanager
def script_progress(what: str, unit: str, args: argparse.Namespace) -> Iterator[Any]:
    """Show a bar on a terminal while scripts run, and print the last lines of a failed script to stderr.

    Args:
        what: name of the work.
        unit: unit of the bar.
        args: options of the command; with ``--json`` there is no bar.
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
