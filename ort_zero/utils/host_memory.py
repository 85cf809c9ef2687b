"""Allocate memory for gigabytes of tensors, in large pages if the system provides these quickly.

A new page of 4 KiB costs more time than the copy that fills it, and large pages cost a tenth of that. But if a virtual
machine's host has taken unused memory back, large pages cost more than small pages.
"""

from __future__ import annotations

import mmap
import time

import torch

_LARGE = 8 << 20
"""Number of bytes from which memory is allocated in large pages."""
_PAGE = 2 << 20
"""Bytes of a large page."""
_SLOW = 1_000_000
"""CPU time in nanoseconds from which a large page is slow: the time of small pages with the same bytes."""
_SUCCESSION = 16
"""Number of pages within which two slow pages end the use of large pages."""


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor in CPU memory with undefined values; a large tensor gets large pages on first use.

    Args:
        elements: number of elements.
        dtype: type of the elements.
    """
    size = elements * dtype.itemsize
    if size < _LARGE:
        return torch.empty(elements, dtype=dtype)
    return torch.frombuffer(_mapped(size), dtype=dtype)


class FilledHostMemory:
    """An allocator of 1-D tensors in CPU memory that touches large pages in advance, while these come quickly.

    A single slow page is no reason to give up large pages. Two slow pages in quick succession mean that the host has
    taken the memory back. Later tensors then have small pages, which the system provides on first use.
    """

    def __init__(self) -> None:
        self._slow = 0
        """Number of pages from now on within which another slow page ends the use of large pages."""
        self._large = True

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor with undefined values.

        Args:
            elements: number of elements.
            dtype: type of the elements.
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
