"""Room for tensors in a file that is mapped into memory: what does not fit into memory goes to the disk by itself."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch


class Scratch:
    """A temporary file that tensors lie in. It has no name, so nothing of it is left when the process ends.

    Args:
        folder: folder of the file system that it lies in; by default the system's for temporary files.
    """

    def __init__(self, folder: str | None = None):
        self._file = tempfile.TemporaryFile(prefix=".ort_zero_", dir=folder, buffering=0)
        self._size = 0

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        start = self._size
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._file.fileno(), self._size)
        mapped = mmap.mmap(self._file.fileno(), size, offset=start)
        return torch.frombuffer(mapped, dtype=dtype)

    def close(self) -> None:
        """Give the disk's room back once no tensor is used any more."""
        self._file.close()
