"""Draw a comparison as one HTML file, which works without network and server."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.comparison import ComparedRecord, Comparison
from ort_zero.statistics.naming import module_name, span
from ort_zero.statistics.rows import COLUMNS
from ort_zero.utils.atomic_write import write_text

GENERATOR = "ort_zero statistics report"
MAX_BYTES = 200_000
"""Maximum size of the records in the file, in bytes; other steps and ranks are left out with a note."""
_NAMES = ("shape", "dtype", *COLUMNS)
_TEMPLATES = Path(__file__).with_name("templates")
_FACTS = {
    "path": "folder", "backend": "runs in", "model": "model", "dtype": "dtype", "zero_stage": "ZeRO stage",
    "world_size": "ranks", "run_id": "run id",
}  # fmt: skip


def write_report(comparison: Comparison, path: str | os.PathLike) -> Path:
    """Write the report of a comparison, and replace an earlier report.

    Args:
        comparison: the comparison to draw.
        path: path of the HTML file.

    Raises:
        StatisticsError: the file exists and is not a report of ort_zero, or cannot be written.
    """
    return write_page(path, _render(comparison))


def write_page(path: str | os.PathLike, text: str) -> Path:
    """Write a page of HTML, and replace an earlier one; for arguments and errors see :func:`write_report`."""
    target = check_target(path)
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


def rendered(template: str, **values: Any) -> str:
    """Return a template of :data:`_TEMPLATES` with its values filled in."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters["text"] = _text
    css = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(generator=GENERATOR, css=css, **values)


def _render(comparison: Comparison) -> str:
    from markupsafe import Markup

    payload, left_out = packed_records(comparison)
    a, b, verdict = comparison.a, comparison.b, comparison.verdict
    outcome = "same" if verdict.same else f"differs at {verdict.module or 'the root module'}"
    return rendered(
        "report.html",
        title=f"{outcome}: {Path(a.path).name} against {Path(b.path).name}",
        c=comparison,
        d=verdict.difference,
        names=_NAMES,
        module_name=module_name,
        facts=[(label, getattr(a, name), getattr(b, name)) for name, label in _FACTS.items()]
        + [("steps", span(a.steps), span(b.steps))],
        span=span(comparison.steps),
        notes=[*(f"To begin with: {what}" for what in comparison.beginnings), *comparison.notes, *left_out],
        js=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        payload=Markup(payload),
    )


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else _plain(value)


def packed_records(comparison: Comparison) -> tuple[str, list[str]]:
    """Return compressed records, beginning with the step and rank of the first divergence, and a note on the rest."""
    first = comparison.verdict.difference
    groups: list[dict[str, Any]] = []
    size = left_out = 0
    by_distance = sorted(
        comparison.series, key=lambda one: first is None or (one[0].step, one[0].rank) != (first.step, first.rank)
    )
    for records in by_distance:
        step, rank = records[0].step, records[0].rank
        is_first = [first is not None and _place(one) == _place(first) for one in records]
        rows = [_row(one) for one in records]
        group = {"step": step, "rank": rank, "first": is_first.index(True) if any(is_first) else -1, "rows": rows}
        cost = len(_squeezed(group))
        if groups and size + cost > MAX_BYTES:
            left_out += 1
        else:
            groups.append(group)
            size += cost
    notes = [f"This report leaves out {left_out} pairs of step and rank, to stay small."] if left_out else []
    return _squeezed({"names": _NAMES, "groups": groups}) if groups else "", notes


def _place(record: ComparedRecord) -> tuple[int, ...]:
    return record.step, record.rank, record.phase, record.order


def _row(record: ComparedRecord) -> list[Any]:
    sides = [[_plain(side[name]) for name in _NAMES] for side in (record.a, record.b)]
    name = module_name(record.module, record.occurrence)
    numbers = (_plain(record.error), _plain(record.tolerance))
    return [int(record.phase), name, record.tensor, record.kind, *numbers, *sides]


def _plain(value: Any) -> Any:
    """Return a value for JSON, which lacks NaN and inf, with six digits."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(str, value))})"
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _squeezed(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()
