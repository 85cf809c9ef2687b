"""The most memory that a training step took, to be held against what was predicted."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from ort_zero.ortmodule.compat import cpu_allocator


class PeakMeter:
    """Measures by how much a process grows between :meth:`start` and :meth:`read`, in bytes.

    On a GPU PyTorch counts what it gives out (ORTModule takes its memory from PyTorch there). On a CPU the kernel's
    mark of the largest resident set is put back; from it go the pages of files and shared memory.

    Args:
        device: device that the model is on.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._base: int | None = None

    @property
    def started(self) -> bool:
        """Whether :meth:`start` has been called."""
        return self._base is not None

    def start(self) -> bool:
        """Put the mark back; return whether this system lets a process do so."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
            return True
        give_back()
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        except OSError:
            return False
        self._base = _resident()["RssAnon"]
        return True

    def read(self) -> int:
        """Return the growth in bytes up to the highest mark since :meth:`start`."""
        assert self._base is not None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base
        now = _resident()
        return now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._base


def _resident() -> dict[str, int]:
    found: dict[str, int] = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile", "RssShmem"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def give_back() -> None:
    """Return what is held for later to the system: the export of a model leaves hundreds of MB behind."""
    cpu_allocator.give_back()
    if not sys.platform.startswith("linux"):
        return
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
