"""A settled step gets few new pages from the system: the process keeps what the step before has freed."""

from __future__ import annotations

import resource
import statistics
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def no_kept_decisions(tmp_path, monkeypatch):
    """Have graphs made: a later start runs what an earlier one found slower in PyTorch from the first step on."""
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))


def model_of_layers(width: int = 128) -> torch.nn.Module:
    """Return a model of 4 blocks: 2 MiB of gradients with a width of 128, 51 MiB with 640."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(4)
        for layer in (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    ]
    return torch.nn.Sequential(*layers)


def engine_of(stage: int, width: int = 128) -> Any:
    """Return an engine around the model."""
    import deepspeed

    import ort_zero

    ort_zero.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ort_zero": {"log_level": "ERROR"},
    }
    model = model_of_layers(width)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def pages_of_steps(stage: int, width: int = 128, rows: int = 1536) -> float:
    """Return the median number of new pages in a settled step of an engine."""
    import ort_zero

    engine, x, pages = engine_of(stage, width), torch.randn(rows, width), []
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(x).square().mean())
        engine.step()
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    status = ort_zero.status()["models"][-1]
    assert status["fallbacks"] == 0 and status["graph_runs"]["backward"], status
    return statistics.median(pages[20:])


def held_gradients() -> tuple[bool, bool]:
    """Return whether a user's hook holds gradients in a bucket, and whether those stay the same in the next steps.

    A rank of ZeRO-1 copies its own part of the gradients out of the bucket, and leaves the others there.
    """
    engine, held = engine_of(1), []
    hooks = [
        each.register_post_accumulate_grad_hook(lambda parameter: held.append(parameter.grad))
        for each in engine.module.parameters()
    ]
    for step in range(3):
        engine.backward(engine(torch.randn(64, 128)).square().mean())
        if step == 0:
            values = [each.clone() for each in held]
            for hook in hooks:
                hook.remove()
        engine.step()
    size = 4 * engine.optimizer.reduce_bucket_size
    return any(each.untyped_storage().nbytes() == size for each in held), all(map(torch.equal, held, values))


def test_a_settled_step_gets_few_new_pages():
    assert run_on_ranks(pages_of_steps, 1, 2, fresh=True)[0] < 100


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_beyond_glibcs_bound_get_few_new_pages(stage: int):
    """51 MiB of gradients, of which DeepSpeed reduces, gathers and updates no more at once than glibc keeps."""
    assert max(run_on_ranks(pages_of_steps, 2, stage, 640, 64, fresh=True)) < 100


def test_gradients_that_somebody_holds_stay_as_they_are():
    assert run_on_ranks(held_gradients, 2, fresh=True) == [(True, True)] * 2


def test_a_variable_of_the_user_wins():
    chosen = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert run_on_ranks(pages_of_steps, 1, 3, env=chosen, fresh=True)[0] > 1000
