"""Phrases that messages of several packages have in common."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(names: Sequence[str], most: int = 3, count: int | None = None) -> str:
    """Return the first names and how many more there are: ``"a, b, c and 4 more"``.

    Args:
        names: the first ones, or all.
        most: so many are named.
        count: how many there are in all, by default as many as `names`.
    """
    more = (len(names) if count is None else count) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
