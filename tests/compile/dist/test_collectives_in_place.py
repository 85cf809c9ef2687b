"""Gathers and reductions of DeepSpeed work within their tensors on gloo, with the bits of gloo's own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks

SIZE = 1003
"""Elements of each rank's part."""


def patched() -> list[str]:
    """Patch the collectives of DeepSpeed on gloo; return a list that receives the names of torch's, as called."""
    import deepspeed
    import torch.distributed as dist

    from ort_zero.cpu_memory import collectives
    from ort_zero.units import registry

    deepspeed.init_distributed("gloo", verbose=False)
    called: list[str] = []
    backend = deepspeed.comm.comm.cdb

    def noted(name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return collective

    for name in ("broadcast", "all_reduce", "isend"):
        setattr(dist, name, noted(name, getattr(dist, name)))
    for name in ("all_gather_function", "reduce_scatter_function"):
        setattr(backend, name, noted(name, getattr(backend, name)))
    registry.apply("collectives in place", collectives.patches)
    return called


def gathered(dtype: torch.dtype, at_once: bool, own_part: bool) -> tuple[bool, list[str]]:
    """Gather a part of each rank; return whether all have arrived, and which collectives ran."""
    from deepspeed import comm

    called = patched()
    rank, size = comm.get_rank(), comm.get_world_size()
    wanted = torch.cat([torch.full((SIZE,), 10 + each, dtype=dtype) for each in range(size)])
    whole = torch.zeros(SIZE * size, dtype=dtype)
    part = whole.chunk(size)[rank] if own_part else torch.empty(SIZE, dtype=dtype)
    part.fill_(10 + rank)
    work = comm.allgather_fn(whole, part, async_op=not at_once)
    if work is not None:
        work.wait()
        assert work.is_completed()
    return torch.equal(whole, wanted), called


def gathered_in_groups() -> tuple[bool, list[str]]:
    """Gather in groups of two ranks each."""
    import torch.distributed as dist
    from deepspeed import comm

    called = patched()
    rank = comm.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = torch.zeros(2 * SIZE)
    comm.allgather_fn(whole, torch.full((SIZE,), float(rank)), group=groups[rank // 2])
    first = rank // 2 * 2
    return torch.equal(whole, torch.cat([torch.full((SIZE,), float(first + each)) for each in range(2)])), called


def reduced(in_place: bool) -> tuple[bool, list[str]]:
    """Reduce random numbers; return whether the part has the bits of torch's own, and which collectives ran."""
    import torch.distributed as dist
    from deepspeed import comm

    called = patched()
    rank, size = comm.get_rank(), comm.get_world_size()
    whole = torch.randn(SIZE * size, generator=torch.Generator().manual_seed(rank))
    before, wanted = whole.clone(), torch.empty(SIZE)
    dist.reduce_scatter_tensor(wanted, before.clone())
    part = whole.chunk(size)[rank] if in_place else torch.empty(SIZE)
    comm.reduce_scatter_fn(part, whole)
    return torch.equal(part, wanted) and (in_place or torch.equal(whole, before)), called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("at_once", "own_part"), [(True, False), (False, True)])
def test_a_gather_broadcasts_each_part(dtype: torch.dtype, at_once: bool, own_part: bool):
    assert run_on_ranks(gathered, 2, dtype, at_once, own_part, fresh=True) == [(True, ["broadcast"] * 2)] * 2


def test_a_gather_in_a_group_broadcasts_from_the_ranks_of_that_group():
    assert run_on_ranks(gathered_in_groups, 4, fresh=True) == [(True, ["broadcast"] * 2)] * 4


def trained(stage: int, exchanging: bool, accumulated: int) -> tuple[list[torch.Tensor], set[str]]:
    """Train two steps under ZeRO; return the weights, and which of the patched collectives ran in the second."""
    import deepspeed

    from ort_zero.cpu_memory import collectives

    collectives._PIECE = 100
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7))
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulated,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1500},
    }
    called = patched() if exchanging else []
    if exchanging:  # an engine without the section has DeepSpeed's own collectives back
        config["ort_zero"] = {"backend": "torch", "log_level": "ERROR"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    inputs = torch.randn(3, 33, generator=torch.Generator().manual_seed(engine.global_rank))
    for step in range(2 * accumulated):
        if step == accumulated:
            called.clear()
        engine.backward(engine(inputs * (step + 1)).square().mean())
        engine.step()
    return [parameter.detach().clone() for parameter in model.parameters()], set(called)


@pytest.mark.parametrize(("ranks", "collective"), [(2, "isend"), (3, "all_reduce")])
def test_a_reduction_in_place_has_the_bits_of_gloos_own(ranks: int, collective: str):
    assert run_on_ranks(reduced, ranks, True, fresh=True) == [(True, [collective])] * ranks


@pytest.mark.parametrize(("stage", "accumulated"), [(1, 1), (2, 2)])
def test_two_ranks_exchange_a_bucket_and_train_the_same_weights(stage: int, accumulated: int):
    ours = run_on_ranks(trained, 2, stage, True, accumulated, fresh=True)
    plain = run_on_ranks(trained, 2, stage, False, accumulated, fresh=True)
    for (weights, called), (wanted, _) in zip(ours, plain, strict=True):
        assert "isend" in called
        assert all(torch.equal(one, other) for one, other in zip(weights, wanted, strict=True))


def test_three_ranks_reduce_a_bucket_as_deepspeed_does():
    assert all("isend" not in called for _, called in run_on_ranks(trained, 3, 1, True, 1, fresh=True))


def test_a_reduction_into_another_tensor_leaves_its_input_alone():
    assert run_on_ranks(reduced, 2, False, fresh=True) == [(True, ["isend"])] * 2
    assert run_on_ranks(reduced, 3, False, fresh=True) == [(True, ["all_reduce"])] * 3


def unequal(kind: str) -> str:
    """Do on rank 1 what rank 0 does otherwise; return the error of this rank."""
    import deepspeed
    import torch.distributed as dist

    from ort_zero.cpu_memory import collectives
    from ort_zero.errors import RankError

    rank = int(os.environ["RANK"])
    try:
        if kind == "units":
            model = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2))
            )
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
                "zero_optimization": {"stage": 2},
                "ort_zero": {"exclude": ["*"] if rank else []},
            }
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        else:
            deepspeed.init_distributed("gloo", verbose=False)
            collectives._exchange([torch.ones(3 + rank), torch.ones(5)], (0, 1), dist.group.WORLD)
    except RankError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("units", "elements of unit"), ("elements", "elements of rank 0 in the group differs: rank 0 has 3")],
)
def test_what_must_be_equal_and_is_not_is_one_error_on_both_ranks(kind: str, words: str):
    first, second = run_on_ranks(unequal, 2, kind, fresh=True, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert first == second and words in first and "rank 1 has" in first


def strided() -> tuple[bool, bool]:
    """Gather and reduce where one rank alone has tensors that are not contiguous; return whether both are right."""
    from deepspeed import comm

    patched()
    rank = comm.get_rank()
    whole = torch.zeros(2 * SIZE, 1 + rank)[:, 0]
    comm.allgather_fn(whole, torch.full((SIZE, 2 - rank), float(rank))[:, 0])
    reduced = torch.zeros(SIZE, 1 + rank)[:, 0]
    comm.reduce_scatter_fn(reduced, torch.ones(2 * SIZE, 2 - rank)[:, 0])
    return torch.equal(whole, torch.arange(2.0).repeat_interleave(SIZE)), torch.equal(reduced, torch.full((SIZE,), 2.0))


def test_tensors_that_are_not_contiguous_on_one_rank_meet_the_collectives_of_the_other():
    assert run_on_ranks(strided, 2, fresh=True) == [(True, True)] * 2
