"""Read the environment variables of ort_zero and of the launchers.

| variable | effect |
|---|---|
| ``ORT_ZERO_DISABLE`` | ``1``: the entry point and :func:`ort_zero.enable` do nothing |
| ``ORT_ZERO_BACKEND`` | ``compile`` (default), ``ortmodule`` or ``torch``: who runs where the backend is "auto" |
| ``ORT_ZERO_CACHE_DIR`` | folder of built C++ extensions and of placements (default ``$XDG_CACHE_HOME/ort_zero``) |
| ``ORT_ZERO_LOG_LEVEL`` | overrides the section's ``log_level``; an unknown name raises (:mod:`ort_zero.log`) |
| ``ORT_ZERO_DEBUG`` | ``1``: errors of the command line show their traceback |
| ``ORT_ZERO_MEMORY_TRIAL`` | internal: file with the request of ``ort-zero memory plan`` to the script that it runs |
| ``ORT_ZERO_PROFILE`` | internal: file with the request of ``ort-zero profile`` to the script that it runs |
| ``ORT_ZERO_EXPLAIN`` | internal: file with the request of ``ort-zero explain`` to the script that it runs |
| ``ORT_ZERO_STATISTICS`` | internal: file with the request of ``ort-zero stats run`` to the script that it runs |

``OMP_NUM_THREADS`` is the number of threads of ONNX Runtime too; by default a rank has its share of the cores.
``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are set by the launchers.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ort_zero.utils.atomic_write import write_json

MEMORY_TRIAL = "ORT_ZERO_MEMORY_TRIAL"
PROFILE = "ORT_ZERO_PROFILE"
EXPLAIN = "ORT_ZERO_EXPLAIN"
STATISTICS = "ORT_ZERO_STATISTICS"
_TRUE = {"1", "true", "yes", "on"}
_RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables of torchrun, DeepSpeed's launcher and Open MPI with the number of ranks on this host."""


def flag(name: str) -> bool:
    """Return True if the variable `name` is set to 1, true, yes or on."""
    return os.environ.get(name, "").strip().lower() in _TRUE


def disabled() -> bool:
    """Return True if ``ORT_ZERO_DISABLE`` switches the plugin off in this process."""
    return flag("ORT_ZERO_DISABLE")


def backend() -> str:
    """Return the engine that ``ORT_ZERO_BACKEND`` names, ``compile`` without it; the value is not checked."""
    return os.environ.get("ORT_ZERO_BACKEND", "").strip() or "compile"


def cache_dir() -> Path:
    """Return the folder for built extensions: below the one for temporary files if the user's cache is not writable."""
    folder = user_cache_dir()
    if folder is not None and (os.environ.get("ORT_ZERO_CACHE_DIR") or can_write(folder)):
        return folder
    return Path(tempfile.gettempdir()) / f"ort_zero-{os.geteuid()}"


def user_cache_dir() -> Path | None:
    """Return the user's cache folder, writable or not; None for a user without a home."""
    explicit = os.environ.get("ORT_ZERO_CACHE_DIR")
    base = explicit or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser()
    except RuntimeError:  # neither HOME nor a home in the password database
        return None
    return folder if explicit else folder / "ort_zero"


def can_write(folder: Path) -> bool:
    """Return whether `folder`, or the nearest folder above it that exists, can be written to."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


@functools.cache
def request(variable: str) -> dict[str, Any] | None:
    """Return what a command asks of the script that it has started; None without a command that waits."""
    name = os.environ.get(variable)
    return json.loads(Path(name).read_text(encoding="utf-8")) if name and Path(name).is_file() else None


def answer(variable: str, report: Any) -> None:
    """Write this rank's report for the command that waits for it; does nothing where no command waits any more."""
    asked = request(variable)
    if asked is not None and Path(asked["report"]).parent.is_dir():  # not on other machines than the command's
        write_json(Path(f"{asked['report']}.{rank()}"), report)


def rank() -> int:
    """Return this process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0") or 0)


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1") or 1))


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 without a launcher."""
    return _ranks_of_host() or 1


def _ranks_of_host() -> int:
    """Return the number of ranks on this host that the launcher names; 0 if it names none."""
    number = next(filter(None, map(os.environ.get, _RANKS_OF_HOST)), "")
    return int(number) if number.isdigit() else 0


def several_hosts() -> bool:
    """Return True if the launcher has started ranks on several hosts."""
    return 0 < _ranks_of_host() < world_size()


def rank_and_host() -> str:
    """Return ``rank 3``, or ``rank 3 on node0`` if ranks are on several hosts, as the beginning of messages."""
    return f"rank {rank()} on {socket.gethostname()}" if several_hosts() else f"rank {rank()}"


def speaks_for_host() -> bool:
    """Return True on one rank of each host, for messages that all its ranks would repeat."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or "0") == "0"


def usable_cores() -> int:
    """Return the number of cores that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0))


def cpu_info() -> str:
    """Return what Linux tells of the processors, empty if it tells nothing."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def threads_per_rank() -> int:
    """Return the number of threads that one rank may use: ``OMP_NUM_THREADS``, else its share of the cores."""
    explicit = os.environ.get("OMP_NUM_THREADS", "")
    if explicit.isdigit() and int(explicit) > 0:
        return int(explicit)
    return max(1, usable_cores() // local_world_size())
