"""What ORT's CPU arena takes from the system for a sequence of allocations: best fit with coalescing, as it does it.

Upstream: ``core/framework/bfc_arena.cc`` of onnxruntime 1.19. A region is as large as the next power of two, and of a
region only those pages count that were written to.
"""

from __future__ import annotations

import bisect

_UNIT = 256
_FIRST = 1 << 20
_LARGEST = 1 << 30
"""Largest region in bytes that the arena takes from the system, unless one allocation is larger."""
_DEAD = 128 << 20
"""ORT's own limit. 1.19.2 takes no notice of another one, a contract test measures it."""


class _Chunk:
    __slots__ = ("after", "before", "free", "size")

    def __init__(self, size: int, before: int | None, after: int | None):
        self.size, self.free, self.before, self.after = size, True, before, after


class Arena:
    """Simulates the arena from which an ORT session allocates its values.

    Args:
        dead: bytes by which a chunk may exceed the allocation that it serves without being split.
    """

    def __init__(self, dead: int = _DEAD):
        self._dead = dead
        self._next = _FIRST
        self._chunks: dict[int, _Chunk] = {}
        self._free: list[tuple[int, int]] = []
        self._regions: list[int] = []
        self._touched: dict[int, int] = {}
        self._end = 0

    @property
    def resident(self) -> int:
        """Bytes of the arena that have been written to since it began."""
        return sum(self._touched.values())

    def take(self, size: int) -> int:
        """Allocate `size` bytes and write to all of them; return the address, a number of bytes from 0."""
        size = max(_UNIT, -(-size // _UNIT) * _UNIT)
        found = bisect.bisect_left(self._free, (size, -1))
        if found == len(self._free):
            self._extend(size)
            found = bisect.bisect_left(self._free, (size, -1))
        whole, at = self._free.pop(found)
        chunk = self._chunks[at]
        chunk.free = False
        if whole >= 2 * size or whole - size >= self._dead:
            self._split(at, chunk, size)
        region = self._regions[bisect.bisect_right(self._regions, at) - 1]
        self._touched[region] = max(self._touched[region], at + size - region)
        return at

    def give(self, at: int) -> None:
        """Free the allocation at the address `at` that :meth:`take` returned."""
        chunk = self._chunks[at]
        chunk.free = True
        if chunk.after is not None and self._chunks[chunk.after].free:
            self._join(at, chunk.after)
        if chunk.before is not None and self._chunks[chunk.before].free:
            at = self._join(chunk.before, at)
        bisect.insort(self._free, (self._chunks[at].size, at))

    def _extend(self, size: int) -> None:
        if size > self._next:
            while size > self._next:
                self._next *= 2
            region = self._next
        else:
            region = self._next
            self._next = min(2 * self._next, max(_LARGEST, self._next))
        at, self._end = self._end, self._end + region + _UNIT
        self._regions.append(at)
        self._touched[at] = 0
        self._chunks[at] = _Chunk(region, None, None)
        bisect.insort(self._free, (region, at))

    def _split(self, at: int, chunk: _Chunk, size: int) -> None:
        rest = at + size
        self._chunks[rest] = _Chunk(chunk.size - size, at, chunk.after)
        if chunk.after is not None:
            self._chunks[chunk.after].before = rest
        bisect.insort(self._free, (chunk.size - size, rest))
        chunk.size, chunk.after = size, rest

    def _join(self, first: int, second: int) -> int:
        one, two = self._chunks[first], self._chunks.pop(second)
        for size, at in ((one.size, first), (two.size, second)):
            found = bisect.bisect_left(self._free, (size, at))
            if found < len(self._free) and self._free[found] == (size, at):
                self._free.pop(found)
        one.size, one.after = one.size + two.size, two.after
        if two.after is not None:
            self._chunks[two.after].before = first
        return first
