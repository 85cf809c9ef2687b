"""A gloo connection among all ranks that belongs to nobody else.

Work in the background must not share a process group with training (collectives of two threads would mix), and must
survive ``destroy_process_group()`` at the end of a script, which closes every group that torch knows of.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
from typing import Any

import torch
import torch.distributed as dist

from ort_zero.compat.torch_distributed import default_store
from ort_zero.distributed.process_group import PeerGroup

_numbers = itertools.count()
_TIMEOUT = datetime.timedelta(minutes=30)


class SideChannel:
    """Moves Python objects among the ranks of the default group. All ranks must construct it, in the same order."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(f"ort_zero/side_channel/{next(_numbers)}", default_store())
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, _TIMEOUT)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank. All ranks must call.

        Raises:
            RuntimeError: a rank is gone.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(lengths, torch.tensor([data.numel()]))
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: data.numel()] = data
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._all_gather(everyone, mine)
        return [pickle.loads(t.numpy()[: int(n)].tobytes()) for t, n in zip(everyone, lengths)]

    def _all_gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._group.allgather([outputs], [mine]).wait()


class SideChannelGroup(PeerGroup):
    """All ranks, over a connection that training does not use. All ranks must construct it, in the same order."""

    def __init__(self) -> None:
        self._channel = SideChannel()
        self.rank, self.size = self._channel.rank, self._channel.size

    def _exchange(self, value: Any) -> list[Any]:
        return self._channel.gather(value)
