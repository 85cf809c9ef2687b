"""Memory for a checkpoint: large pages for gigabytes, torch's own for little."""

from __future__ import annotations

import mmap

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
