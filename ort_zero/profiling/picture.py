"""Draw a comparison of two profiles as one HTML page with SVG bars and tables, without scripts and other files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ort_zero.profiling.comparison import Comparison, Row
from ort_zero.profiling.exchange import Part
from ort_zero.profiling.profile_table import headline, milliseconds, names_of, notes

_COLOURS = {
    "kernels": "#4878a8", "gather": "#e0a030", "reduce": "#d06828", "optimizer": "#58a068", "Python": "#9868a8",
    "executor": "#88a0b0", "script": "#b0b0b0",
}  # fmt: skip
_MORE, _LESS = "#c04848", "#48906a"
_WIDTH, _LEFT, _BAR = 760, 190, 26
_SHOWN = 40
"""Maximum number of operators in a table."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; vertical-align: top; }
td { white-space: nowrap; } td.words { white-space: normal; }
td:first-child, th:first-child, td.words { text-align: left; } tr { border-bottom: 1px solid #e4e4e4; }
.scroll { overflow-x: auto; } .sides { display: flex; flex-wrap: wrap; gap: 3rem; }
"""


def html(comparison: Comparison) -> str:
    """Return the HTML page of a comparison."""
    title = escape(headline(comparison))
    ours, theirs = comparison.ort, comparison.torch
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>", f"<h1>{title}</h1>",
        f"<p>A step takes {milliseconds(ours.timed_seconds)} in ONNX Runtime and {milliseconds(theirs.timed_seconds)} "
        "in PyTorch. Under the profilers, as in the rest of this page, a step takes "
        f"{milliseconds(ours.profiled_seconds)} and {milliseconds(theirs.profiled_seconds)}.</p>",
        *(f"<p>{escape(note)}</p>" for note in notes(comparison)),
        "<h2>What a step consists of</h2>", _stacked(comparison), _legend(comparison),
        "<h2>The largest differences</h2>", _diverging(comparison.differences), _table(comparison),
        "<h2>Operators</h2>", '<div class="sides">',
        _operators("ONNX Runtime", ours.parts), _operators("PyTorch", theirs.parts), "</div></body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _svg(height: float, content: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(content)}</svg>'


def _bar(x: float, y: float, width: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{_BAR - 6}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y + _BAR - 11:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _stacked(comparison: Comparison) -> str:
    """Return one bar for each backend, with one section for each kind of part."""
    kinds = comparison.kinds
    longest = max(sum(max(0.0, row.ort) for row in kinds), sum(max(0.0, row.torch) for row in kinds))
    room = _WIDTH - 110 - 90
    drawn = []
    for number, (name, which) in enumerate((("ONNX Runtime", "ort"), ("PyTorch", "torch"))):
        x, y = 110.0, number * (_BAR + 6.0)
        drawn.append(_label(0, y, name))
        for row in kinds:
            seconds = max(0.0, getattr(row, which))
            width = room * seconds / longest if longest else 0.0
            drawn.append(_bar(x, y, width, _COLOURS[row.name], f"{row.name}: {milliseconds(seconds)}"))
            x += width
        drawn.append(_label(x + 8, y, milliseconds(sum(getattr(row, which) for row in kinds))))
    return _svg(2 * (_BAR + 6), drawn)


def _legend(comparison: Comparison) -> str:
    drawn, x = [], 0.0
    for row in comparison.kinds:
        if row.ort or row.torch:
            drawn += [_bar(x, 0, 14, _COLOURS[row.name], row.name), _label(x + 20, 0, row.name)]
            x += 50 + 7.5 * len(row.name)
    return _svg(_BAR, drawn)


def _diverging(rows: Iterable[Row]) -> str:
    """Return one bar for each difference: to the right if ONNX Runtime takes longer, to the left if PyTorch does."""
    rows = list(rows)
    largest = max((abs(row.difference) for row in rows), default=0.0)
    middle = _LEFT + (_WIDTH - _LEFT) / 2
    half = (_WIDTH - _LEFT) / 2 - 80
    drawn = [_label(middle - 8, 0, "ONNX Runtime is faster", "end"), _label(middle + 8, 0, "PyTorch is faster")]
    for number, row in enumerate(rows, 1):
        y = number * _BAR
        width = half * abs(row.difference) / largest if largest else 0.0
        slower = row.difference > 0
        title = f"{row.name}: {milliseconds(row.ort)} in ONNX Runtime, {milliseconds(row.torch)} in PyTorch"
        drawn.append(_label(0, y, row.name))
        drawn.append(_bar(middle if slower else middle - width, y, width, _MORE if slower else _LESS, title))
        edge = middle + width + 6 if slower else middle - width - 6
        drawn.append(_label(edge, y, milliseconds(row.difference, True), "start" if slower else "end"))
    line = f'<line x1="{middle}" x2="{middle}" y1="0" y2="{(len(rows) + 1) * _BAR}" stroke="#888"/>'
    return _svg((len(rows) + 1) * _BAR, [*drawn, line])


def _table(comparison: Comparison) -> str:
    head = ("", "ONNX Runtime", "PyTorch", "difference", "operators of ONNX Runtime", "of PyTorch")
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for row in comparison.differences:
        times = (milliseconds(row.ort), milliseconds(row.torch), milliseconds(row.difference, True))
        cells = [f"<td>{escape(cell)}</td>" for cell in (row.name, *times)]
        words = (names_of(row.ort_operators), names_of(row.torch_operators))
        lines.append("".join([*cells, *(f'<td class="words">{escape(word)}</td>' for word in words)]))
    return _rows(lines)


def _operators(title: str, parts: Iterable[Part]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in (title, "a step", "calls"))]
    for part in list(parts)[:_SHOWN]:
        cells = (part.name or part.kind, milliseconds(part.seconds), f"{part.calls:.0f}" if part.name else "")
        lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return _rows(lines)


def _rows(lines: Iterable[str]) -> str:
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
