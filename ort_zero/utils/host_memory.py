"""Allocate memory for gigabytes of tensors in large pages.

A new page of 4 KiB costs more time than the copy that fills it, and large pages cost a tenth of that.
"""

from __future__ import annotations

import mmap

import torch

_LARGE = 8 << 20
"""Number of bytes from which memory is allocated in large pages."""


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor in CPU memory with undefined values; a large tensor gets large pages on first use."""
    size = elements * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(elements, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
