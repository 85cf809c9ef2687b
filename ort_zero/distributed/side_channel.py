"""Connect all ranks through gloo, apart from every process group of training, whose collectives would mix.

The connection also survives ``destroy_process_group()`` at the end of a script, which closes all groups of torch.
"""

from __future__ import annotations

import os
import pickle
import resource
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ort_zero.compat.torch_distributed import default_store, default_timeout
from ort_zero.distributed.raise_on_all_ranks import RankGroup

_LENGTH = 8
"""Bytes of the message with the length of a rank's data."""
_SPARE = 256
"""Number of files that the process may open besides its connections."""


class SideChannelGroup(RankGroup):
    """The group of all ranks over a connection of its own. All ranks must construct it, in the same order.

    Raises:
        CheckpointError: a rank is gone.
    """

    _made = 0
    """Number of connections that this process has made; an attempt that failed is repeated under the same number."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        (self._gloo,) = self._reached(self._connect, None)

    def _connect(self, _: None) -> list[Any]:
        store = dist.PrefixStore(f"ort_zero/side_channel/{SideChannelGroup._made}", default_store())
        allow_open_files(self.size)
        connected = dist.ProcessGroupGloo(store, self.rank, self.size, default_timeout())
        SideChannelGroup._made += 1
        return [connected]

    def _exchange(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        parts = self._all_gather(data, max(self._lengths(data)))
        return [pickle.loads(part) for part in parts]  # ignores the padding after the pickle

    def _collect(self, data: bytes) -> list[bytes]:
        lengths = self._lengths(data)
        mine = _tensor_of(data, max(lengths))
        everyone = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._gloo.gather([everyone] if everyone else [], [mine], options).wait()
        return [one.numpy()[:length].tobytes() for one, length in zip(everyone, lengths)]

    def _lengths(self, data: bytes) -> list[int]:
        """Return the number of bytes that each rank has."""
        mine = len(data).to_bytes(_LENGTH, "little")
        return [int.from_bytes(one, "little") for one in self._all_gather(mine, _LENGTH)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        """Return the bytes of every rank, padded with zeros to `size` bytes."""
        mine = _tensor_of(data, size)
        everyone = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        self._gloo.allgather([everyone], [mine]).wait()
        return [one.numpy().tobytes() for one in everyone]


def _tensor_of(data: bytes, size: int) -> torch.Tensor:
    """Return bytes as a tensor, padded with zeros to `size` bytes."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor.numpy()[: len(data)] = memoryview(data)
    return tensor


def allow_open_files(more: int) -> int:
    """Raise the limit of open files, as far as the system allows, so that `more` can be opened; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + more + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
