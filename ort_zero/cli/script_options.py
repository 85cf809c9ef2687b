"""Share arguments, a progress bar and the output of failed scripts between commands that run a user's script."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """Return the number of steps that an option asks for."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script, its arguments and its launcher: ``COMMAND [options] SCRIPT [-- ARGUMENT ...]``."""
    parser.usage = f"{parser.prog} [options] SCRIPT [-- ARGUMENT ...]"
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="training script, unchanged")
    text = "arguments of the script, after --"
    parser.add_argument("arguments", nargs="*", default=[], metavar="ARGUMENT", help=text)
    parser.add_argument("--launcher", metavar="WORDS", help='command before the script: "deepspeed --num_gpus 2"')


def command_of(args: argparse.Namespace) -> list[str]:
    """Return the command line that the arguments of :func:`add_script` name."""
    from ort_zero.utils.script_process import command_line

    return command_line(args.script, args.arguments, args.launcher)


@contextlib.contextmanager
def script_progress(what: str, unit: str, args: argparse.Namespace) -> Iterator[Any]:
    """Show a bar on a terminal while scripts run, but for ``--json``; print the last lines of a failed script."""
    from ort_zero.utils.progress import bar
    from ort_zero.utils.script_process import ScriptError

    with bar(None, what, unit, shown=not args.json, delay=0) as shown:
        try:
            yield shown
        except ScriptError as error:
            shown.close()
            for line in error.tail:
                print(f"  | {line}", file=sys.stderr)
            raise


def reports_of(
    args: argparse.Namespace, what: str, unit: str, variable: str, request: dict[str, Any], none: str
) -> list[Any]:
    """Run the script with the request of a command, and return the reports of its ranks.

    Args:
        what: the work, for the bar on a terminal.
        variable: the environment variable that names the request.
        none: why a script that ended well may have no report, which is an error.
    """
    from ort_zero.utils.script_process import ScriptError, run_with_request

    command = command_of(args)
    with script_progress(what, unit, args):
        done = run_with_request(command, variable, request)
        if not done.reports:
            why = f"it ended with status {done.status}" if done.status else none
            raise ScriptError(f"{args.script} has no report: {why}", done.tail if done.status else ())
    return done.reports
