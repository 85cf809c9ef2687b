"""Run ``ort-zero build``: compile the C++ extensions that ORTModule needs."""

from __future__ import annotations

import argparse
import dataclasses

from ort_zero.cli import print_json


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "compile the C++ extensions of onnxruntime-training into the cache (done by itself at the first training)"
    parser = subparsers.add_parser("build", help=text, description=text)
    parser.add_argument("--force", action="store_true", help="compile extensions in the cache again, too")
    return parser


def run(args: argparse.Namespace) -> int:
    """Build the missing extensions, print their folder, and return 0; progress goes to stderr."""
    from ort_zero.backends import loading
    from ort_zero.compat import versions

    engine = "compile" if versions.installed("onnxruntime-training") is None else "ortmodule"
    report = loading.load(engine).build(args.force)
    if args.json:
        print_json(dataclasses.asdict(report))
        return 0
    if report.built:
        print(f"built {', '.join(report.built)} in {report.seconds:.0f} s: {report.directory}")
    else:
        print(f"nothing to do, the extensions are in {report.directory}")
    return 0
