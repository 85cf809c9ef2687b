"""Ranks that aggregate together; each returns its report or what was raised."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from ort_zero.checkpoint import aggregation_stream
from ort_zero.checkpoint.aggregation import aggregate
from ort_zero.distributed.process_group import from_launcher


def together(src: str, dst: str, fails: int | None = None, **options: Any) -> dict[str, Any]:
    """Aggregate as one of the ranks that run; rank `fails` has a full disk."""
    rank = int(os.environ["RANK"])
    if rank == fails:

        def full(self: Any, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        aggregation_stream._Writer.put = full
    started = time.monotonic()
    ranks = from_launcher(src)
    try:
        report = aggregate(src, dst, ranks=ranks, **options)
        result = {"type": None, "files": dict(report.files), "read": report.bytes_read, "warnings": report.warnings}
    except Exception as error:
        result = {"type": type(error).__name__, "text": str(error)}
    dist.barrier()
    return {**result, "seconds": time.monotonic() - started}


def shards(src: str, dst: str) -> dict[str, Any]:
    """Aggregate into several files."""
    return together(src, dst, max_shard_size=200)


def full_on_rank_1(src: str, dst: str) -> dict[str, Any]:
    """Aggregate into several files; the disk of rank 1 is full."""
    return together(src, dst, fails=1, max_shard_size=200)
