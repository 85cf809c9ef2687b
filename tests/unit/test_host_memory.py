"""Memory for a checkpoint that is loaded: large pages while they come quickly, small ones else."""

from __future__ import annotations

import mmap

import pytest
import torch

from ort_zero.checkpoint import host_memory
from ort_zero.checkpoint.host_memory import filled_host_memory

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


@pytest.mark.parametrize("slow, touched", [((), 8), ((3,), 8), ((0, 1), 2), ((2, 5), 6), ((6, 7), 8)])
def test_large_pages_are_given_up_where_they_come_slowly(monkeypatch, slow, touched):
    found: list[Memory] = []
    ticks = [page_time for page in range(8) for page_time in (0, 5_000_000 if page in slow else 100_000)]
    monkeypatch.setattr(host_memory.mmap, "mmap", lambda *a, **k: found.append(Memory(*a, **k)) or found[0])
    monkeypatch.setattr(host_memory.time, "thread_time_ns", iter(ticks).__next__)
    tensor = filled_host_memory(SIZE // 4, torch.float32)
    assert tensor.numel() == SIZE // 4 and tensor.dtype == torch.float32
    assert found[0].touched == [page << 21 for page in range(touched)]
    given_up = [(mmap.MADV_NOHUGEPAGE, touched << 21)] if touched < 8 else []
    assert found[0].advice == [(mmap.MADV_HUGEPAGE,), *given_up]


def test_little_memory_is_torchs_own(monkeypatch):
    monkeypatch.setattr(host_memory.mmap, "mmap", None)
    assert filled_host_memory(1000, torch.bfloat16).shape == (1000,)
