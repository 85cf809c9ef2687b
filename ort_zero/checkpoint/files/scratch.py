"""Put tensors into a memory-mapped temporary file, so that the system can move them from memory to the disk."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

_MAPPED = 64 << 20
"""Minimum number of bytes per memory map: the number of maps of a process is limited, so tensors share maps."""
_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


class Scratch:
    """A temporary file with tensors. The file has no name, so it vanishes when the process ends.

    Args:
        folder: a folder on the disk to use; by default the system's folder for temporary files.
    """

    def __init__(self, folder: str | None = None):
        self._file = tempfile.TemporaryFile(prefix=".ort_zero_", dir=folder, buffering=0)
        self._size = 0
        self._map: mmap.mmap | None = None
        self._used = 0

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros in the file."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        if self._map is None or self._used + size > len(self._map):
            room = -(-max(size, _MAPPED) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._file.fileno(), self._size + room)
            self._map = mmap.mmap(self._file.fileno(), room, offset=self._size)
            self._size += room
            self._used = 0
        begin = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._map, dtype=dtype, count=elements, offset=begin)

    def close(self) -> None:
        """Close the file; the system frees its disk space when no tensor uses it."""
        self._map = None
        self._file.close()
