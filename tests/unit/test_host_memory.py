"""Memory for a checkpoint that is loaded: large pages while they come quickly, small ones else."""

from __future__ import annotations

import mmap

import pytest
import torch

from ort_zero.utils import host_memory
from ort_zero.utils.host_memory import FilledHostMemory

SIZE = 16 << 20


class Memory(mmap.mmap):
    """Memory that notes what is asked of it."""

    def __new__(cls, *args, **options):
        memory = super().__new__(cls, *args, **options)
        memory.touched, memory.advice = [], []
        return memory

    def madvise(self, *args):
        self.advice.append(args)

    def __setitem__(self, position, value):
        self.touched.append(position)
        super().__setitem__(position, value)


def take(monkeypatch, slow: tuple[int, ...], tensors: int = 1) -> list[Memory]:
    """Ask for tensors of 8 large pages each, of which those with the numbers `slow` come slowly."""
    found: list[Memory] = []
    pages = range(8 * tensors)
    ticks = [page_time for page in pages for page_time in (0, 5_000_000 if page in slow else 100_000)]
    monkeypatch.setattr(host_memory.mmap, "mmap", lambda *a, **k: found.append(Memory(*a, **k)) or found[-1])
    monkeypatch.setattr(host_memory.time, "thread_time_ns", iter(ticks).__next__)
    memory = FilledHostMemory()
    for _ in range(tensors):
        tensor = memory.tensor(SIZE // 4, torch.float32)
        assert tensor.numel() == SIZE // 4 and tensor.dtype == torch.float32
    return found


@pytest.mark.parametrize("slow, touched", [((), 8), ((3,), 8), ((0, 1), 2), ((2, 5), 6), ((6, 7), 8)])
def test_large_pages_are_given_up_where_they_come_slowly(monkeypatch, slow, touched):
    (memory,) = take(monkeypatch, slow)
    assert memory.touched == [page << 21 for page in range(touched)]
    given_up = [(mmap.MADV_NOHUGEPAGE, touched << 21)] if touched < 8 else []
    assert memory.advice == [(mmap.MADV_HUGEPAGE,), *given_up]


@pytest.mark.parametrize("slow, taken", [((3, 5), 1), ((3, 20), 3), ((7, 9), 2)])
def test_a_load_gives_large_pages_up_once(monkeypatch, slow, taken):
    memories = take(monkeypatch, slow, tensors=3)
    assert len(memories) == taken
    assert (mmap.MADV_NOHUGEPAGE in [advice[0] for advice in memories[-1].advice]) == (taken < 3)


def test_little_memory_is_torchs_own(monkeypatch):
    monkeypatch.setattr(host_memory.mmap, "mmap", None)
    assert FilledHostMemory().tensor(1000, torch.bfloat16).shape == (1000,)
