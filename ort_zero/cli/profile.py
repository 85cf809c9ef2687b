"""Run ``ort-zero profile``: divide the time of a script's step into its parts, in ONNX Runtime and in PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ort_zero.cli import add_command, print_result
from ort_zero.cli.script_options import add_script, command_of, positive, script_progress
from ort_zero.errors import ConfigError

_EPILOG = """The script is started unchanged twice, once with its "ort_zero" section and once without it (an ORTModule
then runs its module in PyTorch), and ended when its steps are done. Until then it writes its logs and folders as usual.
Times are measured in the calling thread, on the CPU. Exit status: 0 = profiled; 2 = not profiled, with an error."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "show the time of a step by kernel, gather, reduce, Python and optimizer, beside the same model in PyTorch"
    parser = add_command(subparsers, "profile", text, _EPILOG)
    add_script(parser)
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="measured steps (default: 5)")
    text = "steps before them: export, caches (default: 3)"
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help=text)
    text = "also write a trace of all ranks, for ui.perfetto.dev or chrome://tracing"
    parser.add_argument("--trace", metavar="FILE.json", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --trace")
    return parser


def run(args: argparse.Namespace) -> int:
    """Profile the script, print the comparison, and return the exit status."""
    from ort_zero.profiling.command import profile

    trace = Path(args.trace) if args.trace else None
    if trace is not None and not trace.absolute().parent.is_dir():  # before minutes of work
        raise ConfigError(f"--trace {trace}: there is no folder {trace.parent}")
    if trace is not None and trace.exists() and not args.overwrite:
        raise ConfigError(f"--trace {trace} exists; give --overwrite to replace it, or name another file")
    command = command_of(args)
    with script_progress("profiling", "phase", args) as bar:
        comparison = profile(args.script, command, args.steps, args.warmup, trace, bar.move)
    text = comparison.text() if trace is None else f"{comparison.text()}\ntrace: {trace}"
    print_result(args, {**comparison.as_dict(), "trace": args.trace}, text)
    return 0
