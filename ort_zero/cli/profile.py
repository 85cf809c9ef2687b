"""Run ``ort-zero profile``: divide the time of a script's step into its parts, in ONNX Runtime and in PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ort_zero.cli import print_json
from ort_zero.cli.script_options import add_launcher, positive, script_progress

_EPILOG = """The script is started unchanged twice, once with its "ort_zero" section and once without it (an ORTModule
then runs its module in PyTorch), and ended when its steps are done. Until then it writes its logs and folders as usual.
Times are measured in the calling thread, on the CPU. Exit status: 0 = profiled; 2 = not profiled, with an error."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "show the time of a step by kernel, gather, reduce, Python and optimizer, beside the same model in PyTorch"
    usage = "ort-zero profile --script train.py [options] [-- ARGUMENT ...]"
    parser = subparsers.add_parser("profile", help=text, description=text, epilog=_EPILOG, usage=usage)
    parser.add_argument("--script", required=True, metavar="FILE", help="training script, unchanged")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the script, after --")
    add_launcher(parser)
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="measured steps (default: 5)")
    parser.add_argument(
        "--warmup", type=positive, default=3, metavar="N", help="steps before them: export, caches (default: 3)"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="also write a trace of all ranks, for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --trace")
    return parser


def run(args: argparse.Namespace) -> int:
    """Profile the script, print the comparison, and return the exit status."""
    from ort_zero.profiling import command
    from ort_zero.utils import output_files, script_process

    if args.trace:
        output_files.check_output_file(Path(args.trace), "--trace", args.overwrite)
    task = command.ProfileTask(
        script=Path(args.script),
        arguments=tuple(args.arguments),
        launcher=script_process.split_launcher(args.launcher) if args.launcher is not None else (),
        steps=args.steps,
        warmup=args.warmup,
        trace=Path(args.trace) if args.trace else None,
    )
    with script_progress("profiling", "phase", args) as bar:
        comparison = command.profile(task, bar.move)
    if args.json:
        print_json({**comparison.as_dict(), "trace": args.trace})
    else:
        print(comparison.text())
        if args.trace:
            print(f"trace: {args.trace}")
    return 0
