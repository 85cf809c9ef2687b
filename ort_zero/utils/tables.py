"""Lay out tables of text with columns as wide as their widest cells, or narrower with cells of several lines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "  "
"""The space between two columns, by default."""


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), separator: str = GAP) -> list[str]:
    """Return one line per row, with no spaces at its end.

    Args:
        rows: cells, the same number in each row.
        right: numbers of the columns that are aligned right; the others are aligned left.
        separator: stands between two columns.
    """
    widths = column_widths(rows)
    return [line for row in rows for line in row_lines([[cell] for cell in row], widths, right, separator)]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the characters of the widest cell of each column; all rows must have the same number of cells."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def narrowed(widths: Sequence[int], room: int, minimum: Sequence[int]) -> list[int]:
    """Return widths whose sum is at most `room`, as far as `minimum` allows: the widest column shrinks first.

    Args:
        widths: characters of each column.
        room: characters of all columns together, without the separators between them.
        minimum: minimum characters of each column.
    """
    narrow = list(widths)
    for _ in range(sum(narrow) - room):
        shrinkable = [i for i, width in enumerate(narrow) if width > minimum[i]]
        if not shrinkable:
            break
        narrow[max(shrinkable, key=narrow.__getitem__)] -= 1
    return narrow


def row_lines(
    cells: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int] = (), separator: str = GAP
) -> list[str]:
    """Return the lines of one row.

    Args:
        cells: the lines of each cell; the row has as many lines as its highest cell.
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
