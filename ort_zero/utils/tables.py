"""Tables of text: columns side by side, each as wide as its widest cell, or narrower with cells of several lines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "  "
"""The space between two columns, by default."""


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), separator: str = GAP) -> list[str]:
    """Return one line per row, with no spaces at its end.

    Args:
        rows: cells, equally many in each row.
        right: numbers of the columns that are aligned right; the others are aligned left.
        separator: stands between two columns.
    """
    widths = column_widths(rows)
    return [line for row in rows for line in row_lines([[cell] for cell in row], widths, right, separator)]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the characters of the widest cell of each column; all rows have equally many cells."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def narrowed(widths: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """Return widths whose sum is at most `room`, as far as `least` allows: the widest column gives way first.

    Args:
        widths: characters of each column.
        room: characters of all columns together, without what stands between them.
        least: characters below which each column must not go.
    """
    found = list(widths)
    for _ in range(sum(found) - room):
        able = [i for i, width in enumerate(found) if width > least[i]]
        if not able:
            break
        found[max(able, key=found.__getitem__)] -= 1
    return found


def row_lines(
    cells: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int] = (), separator: str = GAP
) -> list[str]:
    """Return the lines of one row.

    Args:
        cells: the lines of each cell; the row is as high as its highest cell.
        widths: characters of each column.
        right: numbers of the columns that are aligned right; the others are aligned left.
        separator: stands between two columns.
    """
    lines = []
    for n in range(max(map(len, cells))):
        texts = [cell[n] if n < len(cell) else "" for cell in cells]
        padded = [t.rjust(w) if i in right else t.ljust(w) for i, (t, w) in enumerate(zip(texts, widths, strict=True))]
        lines.append(separator.join(padded).rstrip())
    return lines
