"""Gives gathered weights their memory: one slab for the graphs of a model, laid out by how long each block is needed.

A step gathers the same weights in the same order as the one before. Taken from the C library, their blocks lie between
others that live longer, and the heap of a process grows with every step although nothing is lost. So the first run of
a graph notes when each block is taken and from when on it is free; :func:`layout` gives each an offset, and from the
second run on a block is a part of the slab. A block that somebody still holds is never given out twice: what finds its
part of the slab taken gets memory of its own, and is counted.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNMENT = 64
"""Offsets are multiples of this number of bytes, the alignment of PyTorch's own memory on the CPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that is needed for a part of a run.

    Attributes:
        size: in bytes.
        first: number of the allocation of the run that takes it.
        end: number of the first allocation that finds it free again.
    """

    size: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets for the blocks of a run.

    Attributes:
        offsets: of each block, in bytes.
        size: of the slab in bytes.
        live: the most bytes that are needed at one time; no layout is smaller.
    """

    offsets: tuple[int, ...]
    size: int
    live: int


def layout(blocks: Sequence[Block]) -> Layout:
    """Return offsets at which no two blocks overlap that are needed at one time: the largest block chooses first."""
    sizes = [-(-block.size // ALIGNMENT) * ALIGNMENT for block in blocks]
    offsets: dict[int, int] = {}
    for i in sorted(range(len(blocks)), key=lambda i: (-sizes[i], i)):
        beside = sorted(
            (offset, offset + sizes[j])
            for j, offset in offsets.items()
            if blocks[j].first < blocks[i].end and blocks[i].first < blocks[j].end
        )
        at = 0
        for begin, end in beside:
            if begin - at >= sizes[i]:
                break
            at = max(at, end)
        offsets[i] = at
    live = max((_live_at(blocks, sizes, block.first) for block in blocks), default=0)
    size = max((offsets[i] + sizes[i] for i in offsets), default=0)
    return Layout(tuple(offsets[i] for i in range(len(blocks))), size, live)


def _live_at(blocks: Sequence[Block], sizes: Sequence[int], time: int) -> int:
    return sum(size for block, size in zip(blocks, sizes, strict=True) if block.first <= time < block.end)


class Slab:
    """The memory that the graphs of one model share; only one of them runs at a time."""

    def __init__(self) -> None:
        self.peak = 0
        """Largest end of a part that was lent, in bytes from the start of the slab."""
        self._memory: mmap.mmap | None = None
        self._lent: list[tuple[int, int, StorageWeakRef]] = []

    @property
    def size(self) -> int:
        """Size in bytes."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size: int) -> None:
        """Let the slab have `size` bytes at least; parts of a smaller one that somebody holds stay valid."""
        if size > self.size:
            self._memory, self._lent, self.peak = mmap.mmap(-1, size), [], 0

    def lend(self, offset: int, size: int) -> torch.Tensor | None:
        """Return the bytes from `offset` on as a tensor, None if somebody holds a part of them.

        Args:
            offset: in bytes.
            size: in bytes, above 0.
        """
        end = offset + size
        in_place = [part for part in self._lent if offset < part[1] and part[0] < end]
        if not all(storage.expired() for _, _, storage in in_place):
            return None
        if in_place:
            self._lent = [part for part in self._lent if part[1] <= offset or end <= part[0]]
        assert self._memory is not None
        # a storage of its own, that ends when nobody holds the part any more
        part = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)
        self._lent.append((offset, end, StorageWeakRef(part.untyped_storage())))
        self.peak = max(self.peak, end)
        return part


_slabs: weakref.WeakKeyDictionary[Any, Slab] = weakref.WeakKeyDictionary()


def slab_of(model: Any) -> Slab:
    """Return the slab of a model, always the same."""
    return _slabs.setdefault(model, Slab())


Key = tuple[int, int]
"""Index of an event, and how many allocations its gather has made before."""


class GatherMemory:
    """Allocates for the gathers of one graph.

    Args:
        slab: shared by the graphs of the model.
        events: number of events that gather something in a whole run.
    """

    def __init__(self, slab: Slab, events: int):
        self.unplanned = 0
        """Number of allocations since the layout was made that did not come from the slab."""
        self.layout: Layout | None = None
        """None until a whole run has been seen."""
        self._slab = slab
        self._events = events
        self._offsets: dict[Key, tuple[int, int]] = {}
        self._event: int | None = None
        self._count = 0
        self._seen: set[int] = set()
        self._taken: list[tuple[Key, int, StorageWeakRef]] = []
        self._ends: dict[int, int] = {}

    def status(self) -> dict[str, int]:
        """Return sizes in bytes, and how many allocations were not planned."""
        planned = 0 if self.layout is None else self.layout.size
        live = 0 if self.layout is None else self.layout.live
        return {"planned": planned, "live": live, "peak": self._slab.peak, "unplanned": self.unplanned}

    def begin_phase(self, *, forward: bool) -> None:
        """Note that a forward or a backward starts, and with a forward a run."""
        self.begin_event(None)
        if not forward:
            return
        if self.layout is None and self._taken and len(self._seen) == self._events:
            self._make_layout()
        self._seen.clear()
        self._taken.clear()
        self._ends.clear()

    def begin_event(self, index: int | None) -> None:
        """Note that the gather of an event starts; None for what belongs to no event."""
        self._event, self._count = index, 0
        if index is not None and self.layout is None:
            self._seen.add(index)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector of `count` elements on the CPU, not set to anything."""
        if self._event is None or count == 0:
            return torch.empty(count, dtype=dtype)
        key, size = (self._event, self._count), count * dtype.itemsize
        self._count += 1
        if self.layout is None:
            self._note_ends()
            result = torch.empty(count, dtype=dtype)
            self._taken.append((key, size, StorageWeakRef(result.untyped_storage())))
            return result
        offset, room = self._offsets.get(key, (0, -1))
        part = self._slab.lend(offset, size) if size == room else None
        if part is None:
            self.unplanned += 1
            return torch.empty(count, dtype=dtype)
        return part.view(dtype)

    def _note_ends(self) -> None:
        for i, (_, _, storage) in enumerate(self._taken):
            if i not in self._ends and storage.expired():
                self._ends[i] = len(self._taken)

    def _make_layout(self) -> None:
        self._note_ends()
        last = len(self._taken)
        blocks = [Block(size, i, self._ends.get(i, last)) for i, (_, size, _) in enumerate(self._taken)]
        self.layout = layout(blocks)
        self._slab.reserve(self.layout.size)
        for (key, size, _), offset in zip(self._taken, self.layout.offsets, strict=True):
            self._offsets[key] = (offset, size)
