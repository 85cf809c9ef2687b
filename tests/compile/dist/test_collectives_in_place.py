"""Gathers and reductions of DeepSpeed work within their tensors on gloo, with the bits of gloo's own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks

SIZE = 1003
"""Elements of each rank's part."""


called: list[str] = []
"""Names of torch's collectives, as called."""


def patch() -> None:
    """Patch the collectives of DeepSpeed on gloo, and note what they call."""
    import deepspeed
    import torch.distributed as dist

    from ort_zero.cpu_memory import collectives
    from ort_zero.runtimes import registry

    deepspeed.init_distributed("gloo", verbose=False)
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


def gathered(dtype: torch.dtype, at_once: bool, has_own_part: bool) -> bool:
    """Gather a part of each rank; return whether all have arrived."""
    from deepspeed import comm

    rank, size = comm.get_rank(), comm.get_world_size()
    wanted = torch.cat([torch.full((SIZE,), 10 + each, dtype=dtype) for each in range(size)])
    whole = torch.zeros(SIZE * size, dtype=dtype)
    part = whole.chunk(size)[rank] if has_own_part else torch.empty(SIZE, dtype=dtype)
    part.fill_(10 + rank)
    work = comm.allgather_fn(whole, part, async_op=not at_once)
    if work is not None:
        work.wait()
        assert work.is_completed()
    return torch.equal(whole, wanted)


def reduced(in_place: bool) -> bool:
    """Reduce random numbers; return whether the part has the bits of torch's own, and the input is as it was."""
    import torch.distributed as dist
    from deepspeed import comm

    rank, size = comm.get_rank(), comm.get_world_size()
    whole = torch.randn(SIZE * size, generator=torch.Generator().manual_seed(rank))
    before, wanted = whole.clone(), torch.empty(SIZE)
    dist.reduce_scatter_tensor(wanted, before.clone())
    part = whole.chunk(size)[rank] if in_place else torch.empty(SIZE)
    comm.reduce_scatter_fn(part, whole)
    return torch.equal(part, wanted) and (in_place or torch.equal(whole, before))


def all_collectives(ranks: int) -> dict[str, tuple[bool, list[str]]]:
    """Run what there is for this number of ranks; return whether the result was right, and what was called for it."""
    patch()
    cases: dict[str, Any] = {"reduced": lambda: reduced(True), "reduced elsewhere": lambda: reduced(False)}
    for dtype in (torch.float32, torch.bfloat16):
        cases[f"gathered {dtype}"] = lambda dtype=dtype: gathered(dtype, True, False)
        cases[f"gathered {dtype}, own part"] = lambda dtype=dtype: gathered(dtype, False, True)
    results = {}
    for name, case in cases.items():
        called.clear()
        results[name] = case(), list(called)
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_right_and_collectives_are_those_within_the_tensors(ranks: int):
    for results in run_on_ranks(all_collectives, ranks, ranks):
        for name, (is_right, names) in results.items():
            assert is_right, name
            if name.startswith("gathered"):
                assert names == ["broadcast"] * ranks, name
            elif name.startswith("reduced"):
                assert names == (["isend"] if ranks == 2 else ["all_reduce"]), name


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
    first, second = run_on_ranks(unequal, 2, kind, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert first == second and words in first and "rank 1 has" in first
