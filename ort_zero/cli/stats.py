"""Run ``ort-zero stats``: write the statistics of two runs side by side, or find their first difference."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from ort_zero.cli import print_json
from ort_zero.statistics import extra
from ort_zero.statistics.naming import module_name, span
from ort_zero.utils import tables

if TYPE_CHECKING:
    from ort_zero.statistics.compare.comparison import ComparedRecord, Comparison
    from ort_zero.statistics.compare.merge import MergeReport
    from ort_zero.statistics.records import RunInfo

_MAX_SHOWN = 10
_HEAD = ("step", "rank", "phase", "module", "tensor", "kind", "error", "tolerance", "inherited", "l2 of a", "l2 of b")
_LEFT = {"phase", "module", "tensor", "kind"}
_EPILOG = "The folders of runs are written by StatisticsSubscriber(output_dir=...)."


def add_parser(subparsers: argparse._SubParsersAction) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands and return their parsers."""
    text = "compare statistics that two runs collected of their activations and gradients"
    parser = subparsers.add_parser("stats", help=text, description=text, epilog=_EPILOG, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    return _add_compare(commands), _add_merge(commands)


def _add_compare(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "name the first divergence of two runs: step, rank, direction, module and tensor"
    epilog = "Exit status: 0 = the same; 1 = they differ; 2 = they cannot be compared."
    parser = commands.add_parser("compare", help=text, description=text, epilog=epilog)
    parser.add_argument("a", metavar="A", help="folder of the run that counts as correct")
    parser.add_argument("b", metavar="B", help="folder of the other run")
    parser.add_argument(
        "--rtol",
        type=_tolerance,
        default="auto",
        metavar="auto|X",
        help="relative error that is tolerated (default: auto, from the dtypes' precision and the reference)",
    )
    parser.add_argument(
        "--reference", metavar="A2", help="a second run like A: differences as between A and A2 are tolerated"
    )
    parser.add_argument("--html", metavar="FILE", help="also write a report to look at, one file that opens offline")
    parser.set_defaults(command="stats compare", work=_compare)
    return parser


def _add_merge(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    text = "write two runs side by side: a text file for each step and rank"
    parser = commands.add_parser("merge", help=text, description=text)
    parser.add_argument("--pt_dir", required=True, metavar="A", help="folder of the PyTorch run")
    parser.add_argument("--ort_dir", required=True, metavar="B", help="folder of the ONNX Runtime run")
    parser.add_argument("--output_dir", required=True, metavar="C", help="new or empty folder to write into")
    parser.set_defaults(command="stats merge", work=_merge)
    return parser


def _tolerance(text: str) -> str | float:
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of 0 or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status."""
    with extra.required():
        return args.work(args)


def _merge(args: argparse.Namespace) -> int:
    from ort_zero.statistics.compare.merge import merge_activation_summary

    report = merge_activation_summary(args.pt_dir, args.ort_dir, args.output_dir)
    print_json(dataclasses.asdict(report)) if args.json else print(text_of_merge(report))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from ort_zero.statistics.compare.compare_runs import compare

    if args.html:
        from ort_zero.statistics.compare.report import check_target, write_report

        check_target(args.html)
    comparison = compare(args.a, args.b, rtol=args.rtol, reference=args.reference, progress=not args.json)
    if args.html:
        write_report(comparison, args.html)
    print_json(as_json(comparison, args.html)) if args.json else print(text_of(comparison, args.html))
    return 0 if comparison.verdict.same else 1


def text_of_merge(report: MergeReport) -> str:
    """Return the report of a merge as the lines that the command prints."""
    only = [f"{n:,} only in {side}" for n, side in ((report.only_pt, "pt"), (report.only_ort, "ort")) if n]
    counted = f"{report.records:,} records" + (f" ({', '.join(only)})" if only else "")
    written = f"wrote {report.output_dir}: {span(report.steps)} of {len(report.ranks)} ranks, {counted}"
    return "\n".join([*(f"note: {note}" for note in report.notes), written])


def as_json(comparison: Comparison, html: str | None = None) -> dict[str, Any]:
    """Return a comparison as plain values, without the report's series; NaN and inf become text."""
    plain = {
        field.name: getattr(comparison, field.name)
        for field in dataclasses.fields(comparison)
        if field.name != "series"
    }
    return {"same": comparison.verdict.same, **_plain(plain), "html": html}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def text_of(comparison: Comparison, html: str | None = None) -> str:
    """Return a comparison as the lines that the command prints, the first divergence first."""
    word = "same: " if comparison.verdict.same else "differs: "
    lines = [word + comparison.verdict.text.removeprefix(word), ""]
    lines += [f"a: {describe(comparison.a)}", f"b: {describe(comparison.b)}"]
    counts = [f"{number:,} {kind}" for kind, number in comparison.counts.items() if number]
    lines.append(
        f"compared: {comparison.records:,} pairs of records of {span(comparison.steps)}, rtol {comparison.rtol}: "
        f"{', '.join(counts) or 'none differs'}"
    )
    lines += [f"note: {note}" for note in comparison.notes]
    if comparison.differences:
        lines += ["", *_table(comparison.differences[:_MAX_SHOWN])]
        total = sum(comparison.counts.values())
        if total > _MAX_SHOWN:
            lines.append(f"... and {total - _MAX_SHOWN:,} more" + ("" if html else " (--html FILE shows them)"))
    if html:
        lines += ["", f"report: {html}"]
    return "\n".join(lines)


def describe(info: RunInfo) -> str:
    """Return the path and the facts of a run in one line."""
    ranks = "1 rank" if info.world_size == 1 else f"{info.world_size} ranks"
    facts = (info.backend, info.model, info.dtype, f"ZeRO-{info.zero_stage}", ranks, span(info.steps))
    return f"{info.path} ({', '.join(fact for fact in facts if fact)})"


def _table(differences: list[ComparedRecord]) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    for one in differences:
        rows.append(
            (
                str(one.step),
                str(one.rank),
                one.phase.name.lower().replace("_", " "),
                module_name(one.module, one.occurrence),
                one.tensor,
                one.kind,
                *(f"{value:.2e}" for value in (one.error, one.tolerance, one.inherited)),
                *(f"{side['l2']:.6g}" for side in (one.a, one.b)),
            )
        )
    return tables.aligned(rows, right={i for i, name in enumerate(_HEAD) if name not in _LEFT})
