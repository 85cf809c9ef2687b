"""PyTorch's tensors on the CPU, allocated by our allocator: aligned, reported, refused as PyTorch's own does it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ort_zero.ortmodule.compat import cpu_allocator, extensions
from ort_zero.ortmodule.compat.ortmodule.loading import import_ortmodule

ROOT = Path(__file__).resolve().parents[3]
SAY = """\
from ort_zero.ortmodule.compat import extensions
from ort_zero.ortmodule.compat.ortmodule.loading import import_ortmodule
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


def test_large_blocks_are_given_out_again_and_what_is_kept_is_limited():
    extension = extensions.load_modules()["cpu_allocator"]
    extension.keep(True)
    before, kept = extension.large_blocks()
    assert kept == 0
    made = [torch.ones(1 << 20) for _ in range(4)]  # 4 MiB each
    used, _ = extension.large_blocks()
    assert 16 << 20 <= used - before < 17 << 20
    places = {tensor.data_ptr() >> 12 for tensor in made}
    assert len({tensor.data_ptr() % 4096 for tensor in made}) == 4
    del made
    assert extension.large_blocks() == (before, used - before)
    again = [torch.empty(1 << 20) for _ in range(4)]
    assert {tensor.data_ptr() >> 12 for tensor in again} == places
    del again
    # a spike, and what comes after it: neither may hold more than the largest sum that there was, and a little
    spike = torch.empty(100 << 20, dtype=torch.uint8)
    used, _ = extension.large_blocks()
    limit = used + used // 8 + (32 << 20)
    del spike
    for size in range(1, 60):
        several = [torch.empty((size << 20) + 4096 * i, dtype=torch.uint8) for i in range(2)]
        assert sum(extension.large_blocks()) <= max(limit, sum(map(len, several)) * 9 // 8 + before + (33 << 20))
        del several
    extension.keep(True)
    assert extension.large_blocks() == (before, 0)


def test_where_memory_is_short_nothing_is_kept():
    extension = extensions.load_modules()["cpu_allocator"]
    torch.ones(1 << 22)
    assert extension.large_blocks()[1] > 0
    cpu_allocator.give_back()
    assert extension.large_blocks()[1] == 0
    torch.ones(1 << 22)
    assert extension.large_blocks()[1] > 0
    try:
        cpu_allocator.keep_nothing()
        before = extension.large_blocks()
        torch.ones(1 << 22).sum()
        assert extension.large_blocks() == before and before[1] == 0
    finally:
        extension.keep(True)


def test_blocks_are_freed_by_other_threads_and_after_a_fork():
    def work(number):
        for size in range(1, 40):
            tensor = torch.full((size << 17,), float(number))
            assert tensor[0] == tensor[-1] == number

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(10):  # while they allocate
        child = os.fork()
        if not child:
            tensor = torch.empty(1 << 20)
            del tensor
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()


def test_peers_of_a_benchmark_have_pytorchs_own():
    extension = extensions.load_modules()["cpu_allocator"]
    before = extension.large_blocks()
    try:
        cpu_allocator.use(False)
        assert not extension.in_use()
        tensor = torch.ones(1 << 20)
        assert extension.large_blocks() == before
        cpu_allocator.use(True)
        assert extension.in_use()
        del tensor
        torch.ones(1 << 20)
    finally:
        cpu_allocator.use(True)


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
