"""Lay out tables of text with columns as wide as their widest cells."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "  "
"""The space between two columns."""


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return one line per row, with no spaces at its end.

    Args:
        right: numbers of the columns that are aligned right; the others are aligned left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(row: Sequence[str]) -> list[str]:
        return [text.rjust(n) if i in right else text.ljust(n) for i, (text, n) in enumerate(zip(row, widths))]

    return [GAP.join(padded(row)).rstrip() for row in rows]
