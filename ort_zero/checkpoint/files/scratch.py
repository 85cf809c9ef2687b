"""Room for tensors in a file that is mapped into memory: what does not fit into memory goes to the disk by itself."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

_MAPPED = 64 << 20
"""Bytes that are mapped at a time: a process has only so many maps, and a model may have more tensors."""
_ALIGNMENT = 64
"""Bytes: tensors begin at multiples of it."""


class Scratch:
    """A temporary file that tensors lie in. It has no name, so nothing of it is left when the process ends.

    Args:
        folder: folder of the file system that it lies in; by default the system's for temporary files.
    """

    def __init__(self, folder: str | None = None):
        self._file = tempfile.TemporaryFile(prefix=".ort_zero_", dir=folder, buffering=0)
        self._size = 0
        self._map: mmap.mmap | None = None
        self._used = 0

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros."""
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
        """Give the disk's room back once no tensor is used any more."""
        self._map = None
        self._file.close()
