"""Draw a comparison as one HTML file, which works without network and server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.comparison import Comparison
from ort_zero.statistics.compare.report_records import packed_records, shown, statistics_of
from ort_zero.statistics.records import RunInfo
from ort_zero.utils.atomic_write import write_text

GENERATOR = "ort_zero statistics report"
_TEMPLATES = Path(__file__).with_name("templates")


def write_report(comparison: Comparison, path: str | os.PathLike) -> Path:
    """Write the report of a comparison, and replace an earlier report.

    Args:
        comparison: the comparison to draw.
        path: path of the HTML file.

    Raises:
        StatisticsError: the file exists and is not a report of ort_zero, or cannot be written.
    """
    target = check_target(path)
    text = _render(comparison)
    try:
        write_text(target, text)
    except OSError as error:
        raise StatisticsError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def check_target(path: str | os.PathLike) -> Path:
    """Return the path of a report after checking that it may be written.

    Raises:
        StatisticsError: the path is another file or a folder, or its folder does not exist.
    """
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise StatisticsError(f"{target.parent} is no folder: the report cannot be written there")
    if target.is_dir():
        raise StatisticsError(f"{target} is a folder; name a file, such as {target / 'report.html'}")
    if target.exists():
        with open(target, "rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise StatisticsError(f"{target} exists and is no report of ort_zero; choose another name")
    return target


def _render(comparison: Comparison) -> str:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters["number"] = shown
    environment.filters["words"] = lambda name: name.replace("_", " ")
    payload, left_out = packed_records(comparison)
    first = comparison.verdict.difference
    names = statistics_of([first.a, first.b]) if first else []
    return environment.get_template("report.html").render(
        generator=GENERATOR,
        title=_title(comparison),
        c=comparison,
        d=first,
        statistics=[name for name in names if name not in ("first", "sketch")],
        facts=_facts(comparison.a, comparison.b),
        span=_span(comparison.steps),
        notes=[*comparison.notes, *left_out],
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        payload=Markup(payload),
    )


def _title(comparison: Comparison) -> str:
    first = comparison.verdict
    verdict = "same" if first.same else f"differs at {first.module or 'the root module'}"
    return f"{verdict}: {Path(comparison.a.path).name} against {Path(comparison.b.path).name}"


def _facts(a: RunInfo, b: RunInfo) -> list[tuple[str, Any, Any]]:
    names = {
        "path": "folder",
        "backend": "runs in",
        "model": "model",
        "dtype": "dtype",
        "zero_stage": "ZeRO stage",
        "world_size": "ranks",
        "run_id": "run id",
    }
    facts = [(label, getattr(a, name), getattr(b, name)) for name, label in names.items()]
    return [*facts, ("steps", _span(a.steps), _span(b.steps))]


def _span(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
