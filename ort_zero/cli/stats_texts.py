"""Return the comparison of two runs as text, and as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from ort_zero.statistics.naming import module_name, span
from ort_zero.utils import tables

if TYPE_CHECKING:
    from ort_zero.statistics.compare.comparison import ComparedRecord, Comparison
    from ort_zero.statistics.records import RunInfo

_MAX_SHOWN = 10
_HEAD = ("step", "rank", "phase", "module", "tensor", "kind", "error", "tolerance", "inherited", "l2 of a", "l2 of b")
_LEFT = {"phase", "module", "tensor", "kind"}


def as_json(comparison: Comparison, html: str | None = None) -> dict[str, Any]:
    """Return a comparison as plain values, without the report's series; NaN and inf become text."""
    fields = {
        field.name: getattr(comparison, field.name)
        for field in dataclasses.fields(comparison)
        if field.name != "series"
    }
    return {"same": comparison.verdict.same, **plain(fields), "html": html}


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, numbers and text, for JSON; NaN and inf become text, enumerations their names."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
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
    lines += [f"to begin with: {what}" for what in comparison.beginnings]
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
