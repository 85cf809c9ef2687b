"""Where gathered weights lie: offsets by life spans, a slab that lends no part twice, runs that repeat."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters

from ort_zero.ortmodule.compat.deepspeed_allocations import GatherAllocations
from ort_zero.ortmodule.runtime.zero3.gather_memory import ALIGNMENT, Block, GatherMemory, Slab, layout, slab_of

KIB = 1024


def test_blocks_that_are_needed_one_after_the_other_share_their_place():
    chain = [Block(KIB, i, i + 1) for i in range(5)]
    assert layout(chain).size == layout(chain).live == KIB
    assert layout([]).size == 0


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_are_needed_at_one_time_never_overlap(seed):
    draw = random.Random(seed)
    blocks = []
    for i in range(40):
        blocks.append(Block(draw.randint(1, 5000), i, i + draw.randint(1, 8)))
    found = layout(blocks)
    for i, (one, at) in enumerate(zip(blocks, found.offsets, strict=True)):
        assert at % ALIGNMENT == 0 and at + one.size <= found.size
        for other, there in list(zip(blocks, found.offsets, strict=True))[i + 1 :]:
            together = one.first < other.end and other.first < one.end
            assert not together or at + one.size <= there or there + other.size <= at
    assert found.live <= found.size <= 1.5 * found.live


def test_a_slab_lends_no_part_that_somebody_holds():
    slab = Slab()
    slab.reserve(4 * KIB)
    part = slab.lend(0, KIB)
    view = part.view(torch.float32)[3:5]
    del part
    assert slab.lend(KIB - 64, KIB) is None and slab.lend(KIB, KIB) is not None
    view.fill_(7.0)
    del view
    assert slab.lend(0, KIB).view(torch.float32)[3] == 7.0
    assert slab.peak == 2 * KIB


def test_a_slab_that_grows_leaves_what_is_lent():
    slab = Slab()
    slab.reserve(KIB)
    part = slab.lend(0, KIB).fill_(3)
    slab.reserve(4 * KIB)
    slab.lend(0, 4 * KIB).fill_(9)
    assert (part == 3).all()


def run(memory: GatherMemory, sizes: list[int]) -> list[int]:
    """Gather vectors one after the other, of which two are held at a time; return their addresses."""
    memory.begin_phase(forward=True)
    held, addresses = [], []
    for i, size in enumerate(sizes):
        memory.begin_event(i)
        held.append(memory.take(size, torch.float32).fill_(i))
        addresses.append(held[-1].data_ptr())
        assert all((vector == i - back).all() for back, vector in enumerate(reversed(held)))
        held = held[-1:]
    return addresses


def test_the_second_run_takes_all_from_the_slab_and_so_does_every_other():
    sizes = [256, 1024, 512, 256, 2048]
    slab = Slab()
    memory = GatherMemory(slab, len(sizes))
    run(memory, sizes)
    assert memory.layout is None
    second = run(memory, sizes)
    assert run(memory, sizes) == second == run(memory, sizes)
    status = memory.status()
    # two neighbours are held at a time
    assert status["planned"] == status["live"] == status["peak"] == 4 * (2048 + 256)
    assert status["unplanned"] == 0


def test_what_was_not_planned_gets_memory_of_its_own():
    sizes = [256, 512, 256]
    memory = GatherMemory(Slab(), len(sizes))
    run(memory, sizes)
    run(memory, sizes)
    memory.begin_event(1)
    kept = memory.take(512, torch.float32).fill_(5)
    run(memory, sizes)  # something holds a part of the slab
    assert (kept == 5).all() and memory.unplanned > 0
    before = memory.unplanned
    run(memory, [256, 1 << 16, 256])  # of another size
    memory.begin_event(None)
    memory.take(100, torch.float32)  # belongs to no event
    assert memory.unplanned > before


def test_an_incomplete_run_makes_no_layout():
    memory = GatherMemory(Slab(), 3)
    run(memory, [256])
    run(memory, [256, 512, 256])
    assert memory.layout is None
    run(memory, [256, 512, 256])
    assert memory.layout is not None


def test_the_graphs_of_a_model_share_a_slab():
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert slab_of(one) is slab_of(one) is not slab_of(other)


def test_vectors_that_a_gather_makes_come_from_elsewhere():
    taken = []

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append((count, dtype))
        return torch.full((count,), 9, dtype=dtype)

    pieces = [torch.arange(3.0), torch.arange(2.0)]
    block = GatherAllocations(take)
    with block, block:
        seen = partition_parameters.torch  # what DeepSpeed's functions see
        flat = seen.empty(6, dtype=torch.float64, device="cpu", requires_grad=False)
        joined = seen.cat(pieces)
        seen.empty(2, 3)
        seen.empty(0, requires_grad=True)
        seen.cat([seen.zeros(2, 2)] * 2)
        seen.cat(pieces, out=flat.narrow(0, 0, 5))
        assert seen.float32 is torch.float32 and seen.Tensor is torch.Tensor
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(seen.empty, 4).result().shape == pool.submit(seen.cat, pieces[1:] * 2).result().shape
    assert partition_parameters.torch is torch
    assert taken == [(6, torch.float64), (5, torch.float32)]
    assert (flat[:5] == torch.tensor([0, 1, 2, 0, 1])).all() and flat[5] == 9
    assert torch.equal(joined, torch.tensor([0.0, 1, 2, 0, 1]))
