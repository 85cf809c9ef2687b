"""Exchange values and failures between ranks, so that a failure on one rank is raised on all and no rank hangs.

Importing this module imports no torch: a command that runs as one process needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ort_zero import env
from ort_zero.errors import RankError


def world_size(group: Any = None) -> int:
    """Return the number of ranks of `group`; 1 without torch.distributed."""
    dist = sys.modules.get("torch.distributed")  # imported if there is a process group
    return dist.get_world_size(group) if dist is not None and dist.is_available() and dist.is_initialized() else 1


def exchange(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every rank. All ranks of `group` must call."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def raise_if_others_failed(reports: Sequence[str | None], what: str, rank: int | None = None) -> None:
    """Raise RankError on this rank if other ranks failed and this rank did not.

    Args:
        reports: error message of each rank, None for a rank without an error.
        what: name of the work of all ranks, for the message.
        rank: this rank; by default the launcher's ``RANK``.

    Raises:
        RankError: names each failed rank and its error.
    """
    failures = failures_in(reports)
    if failures and (env.rank() if rank is None else rank) not in failures:
        raise RankError(f"{what} failed on another rank: {failure_list(failures)}", failures)


def failures_in(reports: Sequence[str | None]) -> dict[int, str]:
    """Return the error message of each failed rank by rank; a report is None for a rank without an error."""
    return {rank: text for rank, text in enumerate(reports) if text is not None}


def failure_list(failures: Mapping[int, str]) -> str:
    """Return the message of each failed rank in one line: ``"rank 1: disk full; rank 3: ..."``."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
