"""Ranks tell each other what they are about to do, so that a failure of one is raised on all and nobody hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """1: the rank builds a graph; 0: it runs the graph it has; :data:`FAILED`: it cannot go on."""
    digest: int
    """Hash of the set of parameters that are trainable on that rank."""
    graph: int = 0
    """Hash of the collectives in the graph that the rank runs, in their order; 0 if it has no graph."""


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


def raise_if_others_failed(reports: Sequence[str | None], what: str, rank: int | None = None) -> None:
    """Raise on a rank that did not fail itself.

    Args:
        reports: error message of each rank, None where it succeeded.
        what: what they did, for the message.
        rank: this rank; by default the launcher's ``RANK``.

    Raises:
        RankError: names each failed rank and its error.
    """
    failures = failures_in(reports)
    if failures and (env.rank() if rank is None else rank) not in failures:
        raise RankError(f"{what} failed on another rank: {failure_list(failures)}", failures)


def failures_in(reports: Sequence[str | None]) -> dict[int, str]:
    """Return the error message of each rank that failed, of reports that are None where a rank succeeded."""
    return {rank: text for rank, text in enumerate(reports) if text is not None}


def failure_list(failures: Mapping[int, str]) -> str:
    """Return the message of each failed rank in one line: ``"rank 1: disk full; rank 3: ..."``."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
