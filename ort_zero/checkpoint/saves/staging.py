"""Copy a rank's shard, so that a background save can write it while training changes the original.

Masters and moments change only in the optimizer's step, so they are copied in the background too. A step that comes
before the copy is done waits for the copy (the idea: CheckFreq, Mohan et al., FAST 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.saves.capture import Shard
from ort_zero.checkpoint.saves.shard_writer import ShardEntry
from ort_zero.utils.host_memory import host_memory

_ALIGN = 64


class Staging:
    """Memory for one copy of a shard, reused by later saves: fresh pages take three times as long as the copy."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """The reserved memory, a uint8 tensor [bytes]."""

    def begin(self, shard: Shard, may_wait: bool) -> tuple[Shard, Callable[[], None]]:
        """Return `shard` with its tensors in the reserved memory, and a function that finishes the copy.

        Args:
            shard: this rank's part, as it lies in the engine. An earlier copy is lost.
            may_wait: copy masters and moments later, before the optimizer's next step. The others are copied at once:
                buffers change in a forward, and users may change weights of the module at any time.

        Raises:
            OSError: no memory.
        """
        needed = max(1, sum(_padded(entry) for entry in (*shard.weights, *shard.moments)))
        if self._bytes.numel() < needed:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never hold old and new memory at once
            self._bytes = host_memory(needed, torch.uint8)
        position = 0
        parts: list[list[ShardEntry]] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entries in (shard.weights, shard.moments):
            copies = []
            for entry in entries:
                copy = self._bytes[position : position + entry.nbytes]
                if may_wait and (entry.kind == MASTER or entries is shard.moments):
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
