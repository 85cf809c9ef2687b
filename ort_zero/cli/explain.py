"""Run ``ort-zero explain``: a script until it is settled what runs in ONNX Runtime and what in PyTorch, and why."""

from __future__ import annotations

import argparse
from typing import Any

from ort_zero.cli import add_command, print_result
from ort_zero.cli.script_options import add_script, reports_of
from ort_zero.profiling.comparison import runners_of

_EPILOG = """The script is started unchanged, and ended when it is settled where each part runs: after some tens of
steps the first time, fewer once that is kept in the cache folder. Exit status: 0 = explained; 2 = not explained, with
an error."""
_SETTINGS = (
    'all that ONNX Runtime can run, whatever is faster: set "{engine}": {{"place": "ort"}} in the section',
    'a module that PyTorch should run whole: set "exclude": ["PATTERN"], such as ["*.head"]',
)
"""What a user can set, as the last lines."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "run a script for some steps, and show what runs in ONNX Runtime, what in PyTorch, and why"
    parser = add_command(subparsers, "explain", text, _EPILOG)
    add_script(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the script until it is settled what runs where, print which runtime runs what, and return the exit status."""
    from ort_zero import env

    none = "it trained no second step, or no model of it runs in ONNX Runtime"
    report = reports_of(args, "explaining", "script", env.EXPLAIN, {}, none)[0]
    print_result(args, report, "\n".join(lines_of(report)))
    return 0


def lines_of(report: dict[str, Any]) -> list[str]:
    """Return an explanation as lines of text."""
    share = report["flop_share"]
    operations = "" if share is None else f"{100 * share:.0f} % of operations in ONNX Runtime, "
    state = "settled" if report["settled"] else "not settled when the script ended,"
    lines = [f"{report['model']}: {operations}{state} after {report['steps']} steps"]
    for name, unit in report["units"].items():
        modules = report["modules"].get(name, 0)
        lines.append(f"{name} ({modules} module{'s' if modules != 1 else ''})")
        found = report["runners"].get(name)
        if found and name not in report["units_in_torch"]:
            lines.append(f"  {runners_of(found)}")
        if name in report["units_in_torch"]:
            lines.append(f"  PyTorch runs it whole: {report['units_in_torch'][name]}")
            continue
        for graph in unit["graphs"]:
            segments = graph["segments"]
            if [segment["runner"] for segment in segments] == ["inductor"]:
                lines.append(f"  {graph['direction']}: compiled by Inductor ({segments[0]['nodes']} nodes)")
                continue
            in_ort = [segment for segment in segments if segment["runner"] == "onnxruntime"]
            lines.append(
                f"  {graph['direction']}: {len(in_ort)} of {len(segments)} segments in ONNX Runtime "
                f"({sum(segment['nodes'] for segment in in_ort)} nodes), calls in PyTorch: {graph['torch_calls']}"
            )
        for operator, entry in unit["in_torch"].items():
            lines.append(f"  PyTorch runs {entry['count']} {operator}: {entry['why']}")
            lines += [f"    {entry['way_out']}"] if entry["way_out"] else []
        lines += [f"  compiled again: {reason}" for reason in unit["recompilations"]]
    lines += [f"{path} is not compiled: {why}" for path, why in report["failures"].items()]
    # torch's explanations and hints are about its own settings
    lines += [
        f"divided at {each['where']}, Python runs between two graphs: {each['reason'].partition(' Explanation: ')[0]}"
        for each in report["graph_breaks"]
    ]
    return [*lines, *(setting.format(engine=report["engine"]) for setting in _SETTINGS)]
