"""Raise the failure of one rank on all ranks that do a job together, so that no rank waits for a failed one.

Importing this module imports no torch: a command that runs as one process needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ort_zero.distributed.sigint import interrupts_deferred, interrupts_delivered
from ort_zero.errors import CheckpointError, OrtZeroError, RankError


class RankGroup:
    """A group of ranks that do one job together; this base class is a single rank, which exchanges nothing."""

    rank = 0
    size = 1
    broken = False
    """True once an exchange failed because another rank is gone."""

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, on every rank. All ranks must call; CheckpointError says that one is gone."""
        return self._reached(self._exchange, value)

    def gather_to_first(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank on rank 0, nothing on the others; as :meth:`gather`."""
        return self._reached(self._collect, data)

    def _exchange(self, value: Any) -> list[Any]:
        """Return the value of every rank; raise RuntimeError if a rank does not answer."""
        return [value]

    def _collect(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank on rank 0, nothing on the others; raise RuntimeError as :meth:`_exchange`."""
        parts = self._exchange(data)
        return parts if self.rank == 0 else []

    def _reached(self, collective: Callable[[Any], list[Any]], value: Any) -> list[Any]:
        try:
            return collective(value)
        except RuntimeError as error:
            self.broken = True
            raise CheckpointError(
                "another rank is gone, or did not answer in time (saves, loads and the like must be called on all "
                f"ranks): {first_line_of(error)}"
            ) from error

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. All ranks must call."""
        return self.gather(value)[0]

    @contextmanager
    def raise_on_all(self, what: str, everywhere: type[OrtZeroError] | None = None) -> Iterator[None]:
        """Run a block on every rank; if it raises on one, it raises on all. All ranks must enter.

        The block must not communicate after a statement that can fail: a rank that leaves it early waits at its end.

        Args:
            what: name of the block's work, for messages.
            everywhere: error class to raise on all ranks alike, with the message of each failed rank, instead of each
                rank's own error. If all ranks failed, each raises its own error.

        Raises:
            CheckpointError: for an OSError of the block, which is its cause.
            RankError: on ranks whose block did not fail; the message names each failed rank.
        """
        with interrupts_deferred():
            error: BaseException | None = None
            try:
                with interrupts_delivered():
                    yield
            except BaseException as caught:
                error = caught
            try:
                reports = self.gather(None if error is None else first_line_of(error))
            except CheckpointError:
                if error is None:
                    raise
                reports = []
            failures = {rank: text for rank, text in enumerate(reports) if text is not None}
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            if everywhere is not None and failures and len(failures) < self.size:
                raise everywhere(listed) from error
            if isinstance(error, OSError):
                raise CheckpointError(f"{what} failed: {error}") from error
            if error is not None:
                raise error
        if failures:
            raise RankError(f"{what} failed on another rank: {listed}", failures)

    def close(self) -> None:
        """Release the connections between the ranks."""


class TorchProcessGroup(RankGroup):
    """The ranks of torch's default process group.

    Args:
        owns_default: True if the group was made for this object, so that :meth:`close` destroys it.
    """

    def __init__(self, owns_default: bool = False):
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._owns_default = owns_default

    def _exchange(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def close(self) -> None:
        """Destroy the default process group if it was made for this object."""
        import torch.distributed as dist

        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()


def default_group() -> RankGroup:
    """Return the ranks of torch's default process group; a single rank without a process group."""
    dist = sys.modules.get("torch.distributed")  # imported if there is a process group
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return RankGroup()
    return TorchProcessGroup()


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error, with the name of its class unless its text is written for users."""
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return first if isinstance(error, (OrtZeroError, OSError)) else f"{type(error).__name__}: {first}"
