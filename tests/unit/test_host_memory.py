"""Memory for a checkpoint: large pages for gigabytes, torch's own for little; what is free for a process."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from ort_zero.utils import host_memory


@pytest.mark.parametrize(("elements", "dtype", "wanted"), [(4 << 20, torch.float32, True), (9, torch.bfloat16, False)])
def test_large_memory_has_large_pages(monkeypatch, elements, dtype, wanted):
    advice = []

    class Memory(mmap.mmap):
        def madvise(self, *args):
            advice.append(args)
            return super().madvise(*args)

    monkeypatch.setattr(host_memory.mmap, "mmap", Memory)
    tensor = host_memory.host_memory(elements, dtype).fill_(3)
    assert (tensor.shape, tensor.dtype, tensor.sum()) == ((elements,), dtype, 3 * elements)
    assert advice == [(mmap.MADV_HUGEPAGE,)] * wanted


def test_the_tightest_control_group_tells_what_is_free(monkeypatch, tmp_path):
    assert 0 < host_memory.free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (process / "self", groups / "jobs/mine"):
        folder.mkdir(parents=True)
    (process / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\n")
    (process / "self/cgroup").write_text("0::/jobs/mine\n")
    monkeypatch.setattr(host_memory, "_PROCESS", process)
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", groups)
    assert host_memory.free_memory() == 8_192_000
    for folder, limit, used in ((groups / "jobs/mine", "max", 900), (groups / "jobs", "5000", 1500)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 500\n")
    assert host_memory.free_memory() == 5000 - (1500 - 500)
