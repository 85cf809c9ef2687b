"""Silence a warning about DeepSpeed's use of torch, which no user can act on.

The filter is put behind all others, so that a user who asks for the warning (``-W``, ``filterwarnings``) gets it.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

_installed: list[Any] = []


def silence() -> None:
    """Silence the warning about the collectives that DeepSpeed calls, until :func:`unsilence`."""
    before = list(warnings.filters)
    text = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    # torch attributes the warning to its own wrapper, not to the caller
    warnings.filterwarnings("ignore", text, FutureWarning, r"torch\.distributed\.c10d_logger", append=True)
    _installed.extend(entry for entry in warnings.filters if entry not in before)


def unsilence() -> None:
    """Remove the filter of :func:`silence`."""
    filters: Any = warnings.filters  # declared as a sequence, documented as a list
    for entry in _installed:
        with contextlib.suppress(ValueError):
            filters.remove(entry)
    _installed.clear()
    # Python remembers decisions of the filters for each line of code; catch_warnings makes it forget them
    with warnings.catch_warnings():
        pass
