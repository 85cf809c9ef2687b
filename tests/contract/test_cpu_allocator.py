"""PyTorch's tensors on the CPU, allocated by our allocator: aligned, reported, refused as PyTorch's own does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ort_zero.compat import extensions
from ort_zero.compat.ortmodule.loading import import_ortmodule

ROOT = Path(__file__).resolve().parents[2]
SAY = """\
from ort_zero.compat import extensions
from ort_zero.compat.ortmodule.loading import import_ortmodule
{before}
import_ortmodule()
print(extensions.load_modules()["cpu_allocator"].in_use())
"""


@pytest.fixture(autouse=True)
def allocator():
    """Puts the allocator in, as the first model in ONNX Runtime does."""
    import_ortmodule()
    assert extensions.load_modules()["cpu_allocator"].in_use()


@pytest.mark.parametrize("elements", [0, 1, 3, 15, 16, 17, 1000, 1 << 20, (1 << 25) + 1])
def test_tensors_are_aligned_and_hold_what_is_written(elements):
    made = [torch.arange(elements, dtype=torch.float32) for _ in range(3)]
    for tensor in made:
        assert elements == 0 or tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.arange(elements, dtype=torch.float32))


def test_storages_grow_shrink_are_copied_and_shared():
    tensor = torch.ones(10)
    tensor.resize_(100_000)[10:] = 2
    assert tensor.sum() == 10 + 2 * 99_990
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400_000)
    tensor.zero_()
    shared = torch.ones(1000).share_memory_()
    assert shared.is_shared() and shared.clone().sum() == 1000
    assert torch.from_numpy(torch.ones(5).numpy()).sum() == 5


def test_the_profiler_sees_what_is_allocated_and_freed():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.empty(1 << 20)
    memory = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert 4 << 20 in memory and sum(memory) == 0, memory


@pytest.mark.parametrize("elements", [1 << 50, (1 << 61) - 20])
def test_memory_that_is_not_there_is_refused_in_the_words_that_programs_look_for(elements):
    # accelerate's find_executable_batch_size among them
    with pytest.raises(RuntimeError, match=f"DefaultCPUAllocator: can't allocate memory.* {elements * 4} bytes"):
        torch.empty(elements)


@pytest.mark.parametrize(
    ("variable", "used"), [("ORT_ZERO_KEEP_ALLOCATOR", False), ("THP_MEM_ALLOC_ENABLE", False), ("OTHER", True)]
)
def test_the_user_can_keep_pytorchs_own(variable, used, monkeypatch):
    monkeypatch.setenv(variable, "1")
    assert _in_use("") is used


def test_an_allocator_of_somebody_else_stays():
    # PyTorch's allocator for mobile stands in for it: there is a switch for it
    before = 'extensions.load_modules()\nimport ctypes, torch, pathlib\n' \
             'lib = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib/libc10.so"))\n' \
             'get = lib._ZN3c1028GetDefaultMobileCPUAllocatorEv\n' \
             'get.restype = ctypes.c_void_p\n' \
             'lib._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh(ctypes.c_void_p(get()), ctypes.c_uint8(0))'  # fmt: skip
    assert _in_use(before) is False


def _in_use(before: str) -> bool:
    run = subprocess.run(
        [sys.executable, "-c", SAY.format(before=before)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()[-1] == "True"
