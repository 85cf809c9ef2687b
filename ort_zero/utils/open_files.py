"""Raise the limit of open files for the connections between many ranks."""

from __future__ import annotations

import os
from contextlib import suppress

_SPARE = 256
"""Number of files that the process may open besides."""


def allow_open_files(more: int) -> int:
    """Raise the limit of open files, as far as the system allows, so that `more` files can be opened.

    A usual limit is 1024, which two connections from each of 512 ranks to all others use up.

    Returns:
        The limit of open files; -1 if the system does not report it.
    """
    try:
        import resource

        now = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return -1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = now + more + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
