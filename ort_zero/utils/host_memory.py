"""Allocate memory for tensors in large pages, which cost a tenth of small ones, and tell how much memory is free."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

_LARGE = 8 << 20
"""Number of bytes from which memory is allocated in large pages."""
_PROCESS, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor in CPU memory with undefined values; a large tensor gets large pages on first use."""
    size = elements * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(elements, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def free_memory() -> int:
    """Return the bytes of CPU memory that processes here can still take: of the machine, or of their control group."""
    lines = (_PROCESS / "meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([available, *_left_in_control_groups()]))


def _left_in_control_groups() -> Iterator[int]:
    """Yield what each control group (version 2) that holds this process leaves of its limit."""
    lines = (_PROCESS / "self/cgroup").read_text().splitlines()
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for folder in [_CONTROL_GROUPS / path for path in paths]:
        for group in (folder, *folder.parents):
            limit = group / "memory.max"  # the root group has none
            if group.is_relative_to(_CONTROL_GROUPS) and limit.is_file() and limit.read_text().strip().isdigit():
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
                yield int(limit.read_text()) - used
