"""Read the default store of ``torch.distributed``, and recognise errors of its collectives."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout

from ort_zero.errors import RankError


def default_store() -> Store:
    """Return the key-value store of the default process group; without one raise ValueError."""
    return _get_default_store()


def record_for_torchrun(text: str) -> None:
    """Have torchrun end its report of failed ranks with `text`, as the traceback of this rank; else do nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))


def silence_deprecated_collectives() -> None:
    """Silence the warning about the collectives that DeepSpeed 0.19 calls, but for users who ask for it (``-W``)."""
    text = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    # torch attributes the warning to its own wrapper, not to the caller
    warnings.filterwarnings("ignore", text, FutureWarning, r"torch\.distributed\.c10d_logger", append=True)


def compares_ranks() -> bool:
    """Return True at ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, where torch compares the collectives of all ranks."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def require_equal(what: str, values: Mapping[str, Any], group: Any, always: bool = False) -> None:
    """Raise RankError on all ranks of `group`, which must all call, if values differ; name the first that does.

    Unless `always`, values are compared at ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` alone: there torch itself compares kinds
    and sizes of collectives, but not whose gradients are added up.
    """
    if not (always or compares_ranks()):
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, {name: str(value) for name, value in values.items()}, group=group)
    for name in dict.fromkeys(name for of_rank in everyone for name in of_rank):
        texts = {rank: of_rank.get(name, "nothing") for rank, of_rank in zip(ranks, everyone, strict=True)}
        if len(set(texts.values())) > 1:
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in texts.items())
            raise RankError(f"{what} needs equal values on all ranks, but {name} differs: {listed}", texts)


def default_timeout() -> timedelta:
    """Return the time limit of the default process group, as ``init_process_group(timeout=...)`` set it."""
    group: Any = dist.group.WORLD
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # no backend for the device
            return group._get_backend(torch.device(device)).options._timeout
    return default_pg_timeout


_FAILED_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket", re.IGNORECASE
)
"""What gloo's errors, plain RuntimeErrors, have in their texts."""


def is_collective_error(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, comes from a collective whose other ranks are gone."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, dist.DistError):
            return True
        if type(error) is RuntimeError and _FAILED_COLLECTIVE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
