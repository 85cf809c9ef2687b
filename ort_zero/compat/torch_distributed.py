"""Read the default store of ``torch.distributed``, and recognise errors of its collectives."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout


def default_store() -> Store:
    """Return the key-value store of the default process group.

    Raises:
        ValueError: no process group has been initialised.
    """
    return _get_default_store()


def default_timeout() -> timedelta:
    """Return the time limit of the default process group, as ``init_process_group(timeout=...)`` set it."""
    group: Any = torch.distributed.group.WORLD
    for device in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):  # no backend for the device, or an old torch without options
            return group._get_backend(torch.device(device)).options._timeout
    return default_pg_timeout


_FAILED_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket", re.IGNORECASE
)


def is_collective_error(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, comes from a collective whose other ranks are gone.

    gloo raises a plain RuntimeError, which only its text distinguishes from other errors.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.distributed.DistError):
            return True
        if type(error) is RuntimeError and _FAILED_COLLECTIVE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
