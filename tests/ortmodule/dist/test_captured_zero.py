"""Nine models train under ZeRO-1, 2 and 3 as plain DeepSpeed does, on two ranks, with dropout and without."""

from __future__ import annotations

import itertools
from typing import Any

import captured_models
import pytest
from launch_once import once
from rank_processes.ranks import run_on_ranks

STEPS = 20
DROPOUT = 0.1
QUICK = (*((3, name, DROPOUT) for name in captured_models.NAMES), (1, "gpt2", 0.0), (2, "bert", DROPOUT))
ALL = tuple(itertools.product((1, 2, 3), captured_models.NAMES, (0.0, DROPOUT)))
SLOW = tuple(case for case in ALL if case not in QUICK)


def train_all(cases: tuple[tuple[int, str, float], ...]) -> dict[Any, dict[str, Any]]:
    """Return the losses of each stage, model and dropout in ONNX Runtime and in PyTorch, and the model's status."""
    import deepspeed
    import torch

    import ort_zero

    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    section = {"backend": "ortmodule", "fallback": "warn", "log_level": "ERROR", "ortmodule": {"place": "ort"}}
    results = {}
    for stage, name, dropout in cases:
        losses: dict[bool, list[float]] = {True: [], False: []}
        torch._dynamo.reset()
        for in_ort in losses:
            model = captured_models.build(name, dropout)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
                **({"ort_zero": section} if in_ort else {}),
            }
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            for step in range(STEPS):
                torch.manual_seed(10 * step + rank)
                loss = engine(**captured_models.batch(name, step, rank=rank)).loss
                engine.backward(loss)
                engine.step()
                losses[in_ort].append(loss.item())
            if in_ort:
                status = ort_zero.status()["models"][-1]
            engine.destroy()
        results[stage, name, dropout] = {"losses": losses[True], "wanted": losses[False], "status": status}
    return results


@once
def trained(cases: tuple[tuple[int, str, float], ...]) -> list[dict[Any, dict[str, Any]]]:
    """Return the results of both ranks."""
    return run_on_ranks(train_all, 2, cases, timeout=25 * len(cases), env={"ORT_ZERO_BACKEND": "ortmodule"})


@pytest.mark.parametrize(
    ("stage", "name", "dropout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_losses_are_those_of_deepspeed(stage, name, dropout):
    case = (stage, name, dropout)
    for results in trained(QUICK if case in QUICK else SLOW):
        result = results[case]
        status = result["status"]
        assert result["losses"] == pytest.approx(result["wanted"], rel=2e-4), status["in_torch"]
        assert status["zero_stage"] == stage and not status["failures"]
        for reason in status["in_torch"].values():
            assert any(words in reason for words in captured_models.IN_PYTORCH.get(name, ())), reason
        runs = status["compiled"]["session_runs"]
        assert min(runs["forward"], runs["backward"]) >= STEPS, "ONNX Runtime's own runs"
