"""The copy of a rank's shard from which a background save writes, while training changes the original.

Masters and moments change in the optimizer's step and nowhere else, so they are copied in the background too, and only
that step waits for it, if it comes before the copy is done (the idea: CheckFreq, Mohan et al., FAST 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ort_zero.checkpoint.records import BUFFER, WEIGHT
from ort_zero.checkpoint.saves.capture import Shard
from ort_zero.checkpoint.saves.shard_writer import ShardEntry
from ort_zero.utils.host_memory import host_memory

_ALIGN = 64


class Staging:
    """Memory for one copy of a shard, kept from save to save: fresh pages cost three times what the copy costs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """The reserved memory, a uint8 tensor [bytes]."""

    def reserve(self, shard: Shard) -> None:
        """Have room for `shard`; what was copied before is lost.

        Args:
            shard: this rank's part, as it lies in the engine.

        Raises:
            OSError: no memory.
        """
        needed = max(1, sum(_padded(entry) for entry in (*shard.weights, *shard.moments)))
        if self._bytes.numel() < needed:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # not beside the new ones
            self._bytes = host_memory(needed, torch.uint8)

    def begin(self, shard: Shard, may_wait: bool) -> tuple[Shard, Callable[[], None]]:
        """Return `shard` with its tensors in the reserved memory, and what has to be called to bring the rest there.

        Args:
            shard: this rank's part, for which there is room.
            may_wait: masters and moments may be copied later, before the optimizer's next step. The others (buffers
                change in a forward, frozen weights whenever the user likes) are copied at once.
        """
        position = 0
        parts: list[list[ShardEntry]] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entries in (shard.weights, shard.moments):
            copies = []
            for entry in entries:
                copy = self._bytes[position : position + entry.nbytes]
                if may_wait and entry.kind not in (WEIGHT, BUFFER):
                    later.append((entry.tensor, copy))
                else:
                    _copy(entry.tensor, copy)
                copies.append(replace(entry, tensor=copy.view(entry.tensor.dtype)))
                position += _padded(entry)
            parts.append(copies)
        extra = [tensor.clone() for tensor in shard.extra_tensors]

        def finish() -> None:
            while later:
                _copy(*later.pop())

        return replace(shard, weights=parts[0], moments=parts[1], extra_tensors=extra), finish


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor, on any device, into bytes of CPU memory."""
    source = tensor.detach()
    if source.device.type == "cpu":
        # numpy copies by memmove, which bypasses the caches: about twice as fast as torch's own copy on one thread
        np.copyto(target.numpy(), source.view(torch.uint8).numpy())
    else:
        target.view(source.dtype).copy_(source)


def _padded(entry: ShardEntry) -> int:
    return entry.nbytes + -entry.nbytes % _ALIGN
