"""Under ZeRO a settled step gets few new pages from the system: glibc keeps what the step before has freed."""

from __future__ import annotations

import resource
import statistics
from typing import Any

import pytest
import torch

from ort_zero.testing.ranks import run_on_ranks


def pages_of_steps(stage: int) -> float:
    """Return the median number of new pages in a step of an engine whose activations take 12 MiB."""
    import deepspeed

    import ort_zero

    ort_zero.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ort_zero": {"log_level": "ERROR"},
    }
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x, pages = torch.randn(1536, 128), []
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(x).square().mean())
        engine.step()
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    status = ort_zero.status()["models"][-1]
    assert status["fallbacks"] == 0 and status["graph_runs"]["backward"], status
    return statistics.median(pages[20:])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_settled_step_gets_few_new_pages(stage: int):
    pages = run_on_ranks(pages_of_steps, 1, stage, fresh=True)[0]
    assert pages < 1000  # none under ZeRO-3; under ZeRO-1 a buffer of gradients, 2 MiB, is mapped anew


def test_a_variable_of_the_user_wins():
    chosen = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert run_on_ranks(pages_of_steps, 1, 3, env=chosen, fresh=True)[0] > 1000
