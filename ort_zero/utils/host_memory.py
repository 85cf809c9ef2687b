"""Memory for gigabytes of tensors, in large pages where these come quickly.

A page of 4 KiB costs more than the copy that fills it, and large ones a tenth of that, unless the machine is a virtual
one whose host has taken unused memory back: then they cost more than small ones.
"""

from __future__ import annotations

import mmap
import time

import torch

_LARGE = 8 << 20
"""Number of bytes from which memory is asked for in large pages."""
_PAGE = 2 << 20
"""Bytes of a large page."""
_SLOW = 1_000_000
"""Nanoseconds of CPU time: as many as the small pages in the place of a large one take."""
_SUCCESSION = 16
"""Number of pages within which two slow ones are the last ones."""


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor in CPU memory, its values undefined; large ones in large pages as they are first used.

    Args:
        elements: number of elements.
        dtype: their type.
    """
    size = elements * dtype.itemsize
    if size < _LARGE:
        return torch.empty(elements, dtype=dtype)
    return torch.frombuffer(_mapped(size), dtype=dtype)


class FilledHostMemory:
    """Makes 1-D tensors in CPU memory whose large pages are there already, for as long as these come quickly.

    A page now and then that comes slowly is no reason to do without the others; two in quick succession are the
    beginning of memory that the host has taken back. What is asked for after that has small pages, which come as they
    are first used.
    """

    def __init__(self) -> None:
        self._slow = 0
        """Number of pages from now on within which a slow one would be the second."""
        self._large = True

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor, its values undefined.

        Args:
            elements: number of elements.
            dtype: their type.
        """
        size = elements * dtype.itemsize
        if size < _LARGE or not self._large:
            return torch.empty(elements, dtype=dtype)
        memory = _mapped(size)
        for position in range(0, size, _PAGE):
            before = time.thread_time_ns()
            memory[position] = 0
            if time.thread_time_ns() - before <= _SLOW:
                self._slow = max(0, self._slow - 1)
            elif not self._slow:
                self._slow = _SUCCESSION
            else:
                self._large = False
                rest = position + _PAGE
                if rest < size and hasattr(mmap, "MADV_NOHUGEPAGE"):
                    memory.madvise(mmap.MADV_NOHUGEPAGE, rest)
                break
        return torch.frombuffer(memory, dtype=dtype)


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
