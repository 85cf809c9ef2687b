"""Run the command ``ort-zero`` (also ``python -m ort_zero``).

Exit status, the same for every command: 0 = done, or the same; 1 = a difference, a failed verification, a problem to
fix; 2 = the command could not do its work (usage, bad input).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ort_zero import __version__, env
from ort_zero.cli import aggregate, convert, diff, doctor, explain, ls, memory, print_json, profile, stats, verify
from ort_zero.errors import CorruptCheckpointError, OrtZeroError
from ort_zero.utils import progress
from ort_zero.utils.masking import masked

_COMMANDS = (doctor, aggregate, convert, verify, ls, diff, stats, memory, profile, explain)

_OTHERS = {name: f"pip install {name}" for name in ("accelerate", "jinja2", "numba", "pyarrow", "transformers")}
_OTHERS["numpy"] = "pip install 'numpy>=1.26,<3'"
"""The commands that install packages which some commands need, besides the supported ones of torch and its like."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports wrong usage in one line, and leaves what follows ``--`` to the user's script."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse; argparse itself gives a script no arguments where an option stands between SCRIPT and ``--``."""
        if args is None or "--" not in args or self.get_default("arguments") is None:
            return super().parse_known_args(args, namespace)
        at = list(args).index("--")
        parsed, unknown = super().parse_known_args(args[:at], namespace)
        parsed.arguments = [*parsed.arguments, *args[at + 1 :]]
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '?(.*?)'? \(choose from (.+)\)", message):
            if near := difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), n=1):
                message = f"{message[: match.start()]}there is no {match[1]}; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (see: {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``args.run``, which takes the arguments, returns the exit status."""
    parser = _Parser(prog="ort-zero", description="DeepSpeed ZeRO in ONNX Runtime.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ort-zero {__version__}")
    # the deepspeed launcher adds this option; an environment variable has the same value
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        made = command.add_parser(subparsers)
        for sub in made if isinstance(made, tuple) else (made,):
            sub.allow_abbrev = False
            sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
            sub.add_argument("-q", "--quiet", action="store_true", help="print errors alone; the exit status answers")
            sub.add_argument("--debug", action="store_true", help="show an error's traceback (or ORT_ZERO_DEBUG=1)")
            sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.
    """
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: docs/install.md
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error("no command given")
    try:
        with _stdout_of(args):
            return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of stdout has closed it; the buffered rest must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        return _report(error, args)


def _stdout_of(args: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Return a ``with`` block in which the command prints as its options and the terminal want."""
    if args.quiet and not args.json:
        return _quietly()
    if args.json or not sys.stdout.isatty():
        return contextlib.nullcontext()
    from ort_zero.cli.colours import ColouredStdout

    return contextlib.redirect_stdout(ColouredStdout())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Print nothing to stdout in a ``with`` block, and show no progress bar."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        progress.hidden.append(True)
        try:
            yield
        finally:
            progress.hidden.clear()


def _report(error: Exception, args: argparse.Namespace) -> int:
    """Print an error in one line, with ``--debug`` as a traceback, and return the exit status."""
    from ort_zero.compat.versions import REQUIREMENTS  # slow, and not needed without an error

    message = masked(str(error).strip())
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if install := ({row.distribution: row.cure for row in REQUIREMENTS} | _OTHERS).get(package):
        message = f"this needs {package}, which is not installed: {install}"
    elif not isinstance(error, (OrtZeroError, OSError)):
        message = f"internal error, {type(error).__name__}: {message}"
    if args.json:
        print_json({"command": args.command, "error": message})
    if args.debug or env.flag("ORT_ZERO_DEBUG"):
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    else:
        first, _, rest = message.partition("\n")
        hint = " (--debug shows all)" if rest else ""
        print(f"ort-zero {args.command}: {first}{hint}", file=sys.stderr)
    return 1 if isinstance(error, CorruptCheckpointError) else 2


if __name__ == "__main__":
    sys.exit(main())
