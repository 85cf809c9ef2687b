"""Pack the records of a comparison into few bytes for the report; records that do not fit are left out with a note."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from ort_zero.statistics.compare.comparison import Comparison, Series

MAX_BYTES = 2_600_000
"""Maximum size of the records in the file, in bytes; plotly.js takes 4.8 million bytes more."""
_DIGITS = 6
_NOT_SHOWN = {"shape", "dtype", "first", "sketch"}


def shown(value: Any) -> str:
    """Return a value as text for the report."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(str, value)) + ")"
    return str(value)


class _Texts:
    """The numbers of texts, each of which is stored in the file once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def packed_records(comparison: Comparison) -> tuple[str, list[str]]:
    """Return the packed records, and notes on records and statistics that are left out."""
    if not comparison.series:
        return "", []
    sides = (side for one in comparison.series for side in _some(one))
    names = [name for name in statistics_of(sides) if name not in _NOT_SHOWN]
    texts = _Texts()
    series: list[dict[str, Any]] = []
    size, left_out, bare = 0, 0, False
    for group in _groups(comparison):
        packed = [_packed(one, names, texts) for one in group]
        cost = len(_squeezed(packed))
        if not series and cost > MAX_BYTES:
            packed, bare = [_packed(one, names, texts, only_differing=True) for one in group], True
            cost = len(_squeezed(packed))
        if series and size + cost > MAX_BYTES:
            left_out += 1
            continue
        series += packed
        size += cost
    notes = [f"This report leaves out {left_out} pairs of step and rank, to stay small."] if left_out else []
    notes += ["To stay small, this report has statistics only of the records that differ."] if bare else []
    content = {
        "texts": list(texts.numbers),
        "statistics": names,
        "series": series,
        "verdict": _divergence(comparison),
        "bare": bare,
    }
    return _squeezed(content), notes


def _groups(comparison: Comparison) -> list[list[Series]]:
    """Group the series by step and rank; the group of the first divergence comes first, the others keep their order."""
    groups: dict[tuple[int, int], list[Series]] = {}
    for one in comparison.series:
        groups.setdefault((one.step, one.rank), []).append(one)
    first = comparison.verdict.difference
    return sorted(groups.values(), key=lambda g: first is None or (g[0].step, g[0].rank) != (first.step, first.rank))


def _some(series: Series) -> Iterable[Mapping[str, Any] | None]:
    """Yield a few records of each run; all records have the same names of statistics."""
    for sides in (series.a, series.b):
        yield from [side for side in sides if side is not None][:3]


def statistics_of(sides: Iterable[Mapping[str, Any] | None]) -> list[str]:
    """Return the names of the statistics in records, without repetitions."""
    return list(dict.fromkeys(name for side in sides if side is not None for name in side))


def _packed(series: Series, names: list[str], texts: _Texts, only_differing: bool = False) -> dict[str, Any]:
    sides = {}
    for name, values in (("a", series.a), ("b", series.b)):
        if only_differing:
            values = [side if kind else None for side, kind in zip(values, series.kinds)]
        sides[name] = {
            "shape": [-1 if side is None else texts(shown(side.get("shape"))) for side in values],
            "dtype": [-1 if side is None else texts(str(side.get("dtype", ""))) for side in values],
            "numbers": [[None if side is None else _number(side.get(key)) for side in values] for key in names],
        }
    return {
        "step": series.step,
        "rank": series.rank,
        "phase": series.phase.name.lower(),
        "module": [texts(name) for name in series.modules],
        "tensor": [texts(name) for name in series.tensors],
        "kind": [texts(name) for name in series.kinds],
        "error": [_number(value) for value in series.errors],
        "tolerance": [_number(value) for value in series.tolerances],
        **sides,
    }


def _number(value: Any) -> Any:
    """Return a number for JSON; NaN and inf, which JSON lacks, become strings."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return str(value)
    return float(f"{value:.{_DIGITS}g}")


def _divergence(comparison: Comparison) -> dict[str, Any] | None:
    first = comparison.verdict.difference
    if comparison.verdict.same or first is None:
        return None
    return {
        "step": first.step,
        "rank": first.rank,
        "phase": first.phase.name.lower(),
        "modules": [f"{first.module}#{first.occurrence}", *([first.module] if first.occurrence == 1 else [])],
        "tensor": first.tensor,
    }


def _squeezed(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()
