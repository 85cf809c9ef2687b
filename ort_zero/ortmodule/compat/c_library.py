"""Settings of the C library's memory allocation."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_MMAP_THRESHOLD = -3
"""glibc's number of the setting (``M_MMAP_THRESHOLD`` in ``malloc.h``)."""
LARGE = 128 << 10
"""Bytes from which a block is a large one: where glibc begins."""


def return_large_blocks() -> bool:
    """Let large blocks go back to the system when they are freed, in this process; return whether they do.

    glibc otherwise raises its limit to the largest block that was ever freed, and holds blocks below it in its heap: a
    step then takes up to one such block more than what exists at one time. What the environment says stays
    (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    if not sys.platform.startswith("linux"):
        return False
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library: Any = ctypes.CDLL(None)
    return hasattr(library, "gnu_get_libc_version") and bool(library.mallopt(_MMAP_THRESHOLD, LARGE))
