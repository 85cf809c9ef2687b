"""Write phrases that messages of several packages have in common."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names and the number of further names: ``"a, b, c and 4 more"``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
