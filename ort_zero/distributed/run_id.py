"""Name a run, equally on all its ranks, without a collective: a single rank may ask for the name."""

from __future__ import annotations

import functools
import os
import uuid

import torch.distributed as dist

_KEY = "ort_zero_run_id"
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@functools.lru_cache(maxsize=1)
def run_id() -> str:
    """Return the name of this run; ranks of one process group get the same."""
    mine = uuid.uuid4().hex[:16]
    if dist.is_available() and dist.is_initialized():
        # the first rank that asks sets the name
        from ort_zero.compat.torch_distributed import default_store

        return default_store().compare_set(_KEY, "", mine).decode()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        launch = "/".join([*(os.environ.get(name, "") for name in _LAUNCHERS), str(os.getppid())])
        return uuid.uuid5(uuid.NAMESPACE_URL, launch).hex[:16]
    return mine
