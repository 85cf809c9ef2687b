"""Captured graphs train under ZeRO-1, 2 and 3 as plain DeepSpeed does, on two ranks."""

from __future__ import annotations

from typing import Any

import captured_models
import pytest
from launch_once import once
from rank_processes.ranks import run_on_ranks

CASES = ((1, "gpt2"), (2, "bert"), (3, "gpt2"), (3, "bert"), (3, "llama"), (3, "vit"))
STEPS = 4


def train_all() -> dict[str, Any]:
    """Return the losses of each stage and model in ONNX Runtime and in PyTorch, and what ran in ONNX Runtime."""
    import deepspeed
    import torch

    import ort_zero

    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    results = {}
    for stage, name in CASES:
        both = []
        section = {
            "backend": "ortmodule", "fallback": "raise", "log_level": "ERROR", "ortmodule": {"place": "ort"},
        }  # fmt: skip
        for in_ort in (True, False):
            model = captured_models.build(name, 0.1)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
                **({"ort_zero": section} if in_ort else {}),
            }
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            losses = []
            for step in range(STEPS):
                torch.manual_seed(10 * step + rank)
                loss = engine(**captured_models.batch(name, step, rank=rank)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            both.append(losses)
            if in_ort:
                status = ort_zero.status()["models"][-1]
            engine.destroy()
        results[stage, name] = *both, status["compiled"]["session_runs"], status["in_torch"], status["zero_stage"]
    return results


@once
def trained() -> list[dict[str, Any]]:
    """Return the results of both ranks."""
    return run_on_ranks(train_all, 2, timeout=240, env={"ORT_ZERO_BACKEND": "ortmodule"})


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_losses_are_those_of_deepspeed(stage, name):
    for results in trained():
        losses, wanted, runs, in_torch, zero_stage = results[stage, name]
        assert losses == pytest.approx(wanted, abs=2e-6)
        assert not in_torch
        assert zero_stage == stage
        assert min(runs["forward"], runs["backward"]) > STEPS
