"""Environment variables that ort_zero reads, in one place.

| variable | effect |
|---|---|
| ``ORT_ZERO_DISABLE`` | ``1``: the entry point arms nothing and :func:`ort_zero.enable` does nothing |
| ``ORT_ZERO_CACHE_DIR`` | folder of the built C++ extensions and of graphs (default ``$XDG_CACHE_HOME/ort_zero``) |
| ``ORT_ZERO_EXPORT_CACHE`` | ``0``: no graphs are kept unless a section names a folder for them |
| ``ORT_ZERO_KEEP_ALLOCATOR`` | ``1``: PyTorch's tensors on the CPU keep its own allocator (docs/memory.md) |
| ``ORT_ZERO_LOG_LEVEL`` | wins over the section's ``log_level``; an unknown name raises (:mod:`ort_zero.log`) |
| ``ORT_ZERO_DEBUG`` | ``1``: command line errors keep their traceback |
| ``ORT_ZERO_MEMORY_TRIAL`` | internal: what ``ort-zero memory plan`` wants of the script that it runs, a file |
| ``ORT_ZERO_PROFILE`` | internal: what ``ort-zero profile`` wants of the script that it runs, a file |
| ``ORT_ZERO_WARM_RANKS`` | ``1``: see `fresh` of :func:`ort_zero.testing.ranks.run_on_ranks` |

``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are set by the launchers.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from ort_zero.utils.cpu_count import usable_cores

MEMORY_TRIAL = "ORT_ZERO_MEMORY_TRIAL"
PROFILE = "ORT_ZERO_PROFILE"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Where torchrun, DeepSpeed's launcher and Open MPI tell how many ranks are on this host."""


def flag(name: str) -> bool:
    """Return True if the variable `name` is set to 1, true, yes or on."""
    return os.environ.get(name, "").strip().lower() in _TRUE


def disabled() -> bool:
    """Return True if the user switched the plugin off for this process."""
    return flag("ORT_ZERO_DISABLE")


def cache_dir() -> Path:
    """Return the folder in which built extensions are kept.

    Where the user's own folder cannot be written to (a home that is read-only, or none), it is one of this user's in
    the folder for temporary files.
    """
    own = own_cache_dir()
    if own is not None and (os.environ.get("ORT_ZERO_CACHE_DIR") or can_write(own)):
        return own
    return Path(tempfile.gettempdir()) / f"ort_zero-{os.geteuid()}"


def own_cache_dir() -> Path | None:
    """Return the folder that the user has for caches, whether or not it can be written to; None without a home."""
    explicit = os.environ.get("ORT_ZERO_CACHE_DIR")
    base = explicit or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        found = Path(base).expanduser()
    except RuntimeError:  # neither HOME nor an entry of the user's
        return None
    return found if explicit else found / "ort_zero"


def can_write(folder: Path) -> bool:
    """Return whether `folder`, or the nearest folder above it that exists, can be written to."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def export_cache_dir() -> Path | None:
    """Return the folder that graphs are kept in unless a section says otherwise; None for keeping none."""
    if os.environ.get("ORT_ZERO_EXPORT_CACHE", "").strip().lower() in _FALSE:
        return None
    own = own_cache_dir()
    return own / "graphs" if own is not None and can_write(own) else None


def memory_trial_file() -> Path | None:
    """Return the file in which ``ort-zero memory plan`` says what it wants of this process; None otherwise."""
    name = os.environ.get(MEMORY_TRIAL)
    return Path(name) if name else None


def profile_file() -> Path | None:
    """Return the file in which ``ort-zero profile`` says what it wants of this process; None otherwise."""
    name = os.environ.get(PROFILE)
    return Path(name) if name else None


def rank() -> int:
    """Return this process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0") or 0)


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without one."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1") or 1))


def local_world_size() -> int:
    """Return how many ranks share this machine; 1 without a launcher."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))


def several_hosts() -> bool:
    """Return True if the launcher says that its ranks are on more hosts than this one."""
    local = next(filter(None, map(os.environ.get, _RANKS_OF_HOST)), "")
    return local.isdigit() and 0 < int(local) < world_size()


def rank_and_host() -> str:
    """Return ``rank 3``, or ``rank 3 on node0`` where ranks are on several hosts, as lines for people begin."""
    return f"rank {rank()} on {socket.gethostname()}" if several_hosts() else f"rank {rank()}"


def speaks_for_host() -> bool:
    """Return True in one of the ranks of each host, for what all of them would say alike."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or "0") == "0"


def threads_per_rank() -> int:
    """Return the number of threads that one rank may use: ``OMP_NUM_THREADS``, else its share of the cores."""
    explicit = os.environ.get("OMP_NUM_THREADS", "")
    if explicit.isdigit() and int(explicit) > 0:
        return int(explicit)
    return max(1, usable_cores() // local_world_size())
