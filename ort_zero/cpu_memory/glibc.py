"""Have glibc keep the memory that a step frees: each page that goes back is filled with zeros for the next step."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``'s parameters in ``malloc.h``."""
_KEPT = 1 << 30
"""Bytes of free memory at the top of the heap beyond which ``free`` returns it to the system. glibc itself chooses
128 KiB to 64 MiB."""
_MAPPED = 32 << 20
"""Size in bytes from which ``malloc`` maps each allocation separately: the largest that glibc itself chooses."""
LARGEST_KEPT = _MAPPED - (1 << 16)
"""Bytes of the largest tensor that leaves room for malloc's own words below that size."""
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user chooses."""
kept: list[str] = []
"""Has an element, the name of this measure, once glibc keeps freed memory."""


def hindrance() -> str | None:
    """Return why freed memory cannot be kept: a variable of the user's, another C library; None if it can."""
    chosen = [name for name in _CHOICES if name in os.environ]
    if chosen:
        return f"{chosen[0]} is set"
    if not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")):
        return "the C library is not glibc"
    return None


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 1 GiB of freed memory in this process, instead of returning it to the system.

    Nothing changes where a variable of glibc chooses already, or where the C library is another one.
    """
    if hindrance() is not None:
        return
    library = ctypes.CDLL(None)
    # the second call alone would end glibc's own choice of the other threshold, at 128 KiB
    if library.mallopt(_MMAP_THRESHOLD, _MAPPED) and library.mallopt(_TRIM_THRESHOLD, _KEPT):
        kept[:] = ["freed memory is kept"]
