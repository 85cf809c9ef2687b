"""Ranks tell each other what they are about to do, so that a failure of one is raised on all and nobody hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ort_zero import env
from ort_zero.errors import RankError

FAILED = 2


def world_size(group: Any = None) -> int:
    """Return the number of ranks of `group`; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank is about to do."""

    code: int
    """1: a graph is made; 0: one is there; :data:`FAILED`."""
    digest: int
    """Of which parameters are trainable on that rank."""
    graph: int = 0
    """Of the collectives in the graph that is there."""


def votes(code: int, digest: int, group: Any = None, graph: int = 0) -> list[Vote]:
    """Return the vote of every rank. All ranks of `group` must call."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([code, digest, graph], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [Vote(*t.tolist()) for t in everyone]


def exchange(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every rank. All ranks of `group` must call."""
    everyone: list[Any] = [None] * world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def raise_if_others_failed(reports: list[str | None], what: str, rank: int | None = None) -> None:
    """Raise on a rank that did not fail itself.

    Args:
        reports: error message of each rank, None where it succeeded.
        what: what they did, for the message.
        rank: this rank; by default the launcher's ``RANK``.

    Raises:
        RankError: names each failed rank and its error.
    """
    failures = {rank: text for rank, text in enumerate(reports) if text is not None}
    if failures and (env.rank() if rank is None else rank) not in failures:
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        raise RankError(f"{what} failed on another rank: {lines}", failures)
