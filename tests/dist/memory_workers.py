"""Trainings with and without recomputation that must lead to the same losses and parameters, and plans that fail."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_models import bert, gpt2
from workers import ds_config, full_parameters, start

from ort_zero.plugin import registry

WORDS, HIDDEN, LENGTH, BATCH = 256, 128, 64, 24
STEPS = 2
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}


def build(kind: str) -> torch.nn.Module:
    """Return the model, the same on every rank and at every call, with dropout."""
    torch.manual_seed(0)
    make = {"gpt2": gpt2, "bert": bert}[kind]
    return make(words=WORDS, hidden=HIDDEN, layers=2, positions=LENGTH, **DROPOUT[kind])


def batch(i: int) -> dict[str, torch.Tensor]:
    """Return micro-batch `i` of this rank."""
    generator = torch.Generator().manual_seed(100 * i + torch.distributed.get_rank())
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def train(kind: str, stage: int, memory: dict | None, *, efficient: bool = False, gas: int = 1) -> dict[str, Any]:
    """Train a few steps; return losses, parameters, the status of the model."""
    import deepspeed

    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = ds_config(stage, ort=True, gas=gas, **zero)
    config["train_micro_batch_size_per_gpu"] = BATCH
    config["ort_zero"]["memory_efficient_gradients"] = efficient
    if memory is not None:
        config["ort_zero"]["memory"] = memory
    model = build(kind)
    engine, *rest = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses = []
    for step in range(STEPS):
        for micro in range(gas):
            loss = engine(**batch(step * gas + micro)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    found = {
        "losses": losses,
        "parameters": full_parameters(model),
        "status": registry.runtimes()[-1].status(),
    }
    engine.destroy()
    del engine, rest, model
    gc.collect()
    return found


def compare(cases: list[tuple]) -> dict[str, Any]:
    """Train each case (kind, stage, memory section, options) without and with recomputation."""
    start()
    report = {}
    for name, kind, stage, memory, options in cases:
        reference, ours = train(kind, stage, None, **options), train(kind, stage, memory, **options)
        pairs = [(reference["parameters"][n], p) for n, p in ours["parameters"].items()]
        report[name] = {
            "reference": reference["losses"],
            "losses": ours["losses"],
            "apart": max((a - b).abs().max().item() for a, b in pairs),
            "status": ours["status"],
            "plain": reference["status"],
        }
    return report


def refused(cases: list[tuple[dict, dict[int, str] | None]]) -> list[dict[str, Any]]:
    """Train with sections that are wrong, one after the other; return the errors, and how many steps ran.

    Args:
        cases: the section's ``memory`` part, and the content of ``plan.json`` in the working directory by rank.
    """
    start()
    return [_refused(memory, write) for memory, write in cases]


def _refused(memory: dict, write: dict[int, str] | None) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        if write is not None and rank in write:
            Path(folder, "plan.json").write_text(write[rank])
        os.chdir(folder)
        try:
            train("gpt2", 2, memory)
        except Exception as error:
            models = registry.runtimes()
            ran = sum(sum(r.runs[True].values()) for r in models)
            return {"error": f"{type(error).__name__}: {error}", "ran": ran}
        finally:
            os.chdir("/")
    return {"error": None}


def peak(kind: str, case: str) -> dict[str, Any]:
    """Return the growth of this process in the first step of a model of some 200 MiB, and the plan of `case`."""
    from ort_zero import config
    from ort_zero.plugin import engine_patch
    from ort_zero.recompute.resident_memory import PeakMeter
    from ort_zero.testing.peaks import start_at_first_run

    torch.manual_seed(0)
    model = {"gpt2": gpt2, "bert": bert}[kind](words=1024, hidden=256, layers=4, positions=128, **DROPOUT[kind])
    section = {"off": {}, "all": {"recompute": "all"}}.get(case, {"recompute": "auto", "budget": case})
    runtime, wrapped = engine_patch.wrap(
        model.train(), config.OrtModuleConfig(), 0, memory=config.MemoryConfig(**section)
    )
    meter = PeakMeter(torch.device("cpu"))
    start_at_first_run(runtime, meter)
    ids = torch.randint(0, 1024, (12, 128), generator=torch.Generator().manual_seed(1))
    losses, measured = [], 0
    for _ in range(2):
        loss = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone()).loss
        loss.backward()
        measured = measured or meter.read()
        losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad = None
    decisions = runtime.status()["memory"]
    return {"peak": measured, "losses": losses, "decision": decisions[0] if decisions else None}
