"""Two ranks with recomputation: the losses of a run without it, under every ZeRO stage; bad plans stop all ranks."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from launch_once import once
from rank_processes.ranks import run_on_ranks
from recompute_models import DROPOUT
from tiny_models import bert, gpt2

from ort_zero.backends import registry

# -- what each rank runs -----------------------------------------------------------------------------------------------


WORDS, HIDDEN, LENGTH, BATCH = 256, 128, 64, 24
STEPS = 2
BLOCKS = {"checkpointing": "recompute"}
MANY_LOGITS = "many logits"


def build(kind: str) -> torch.nn.Module:
    """Return the model, the same on every rank and at every call, with dropout."""
    torch.manual_seed(0)
    if kind == MANY_LOGITS:
        return gpt2(words=4096, hidden=32, layers=1, positions=LENGTH, **DROPOUT["gpt2"])
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

    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0} if stage == 3 else {}
    config = ds_config(stage, ort=True, gas=gas, **zero)
    config["train_micro_batch_size_per_gpu"] = BATCH
    config["ort_zero"]["memory_efficient_gradients"] = efficient
    # those that a graph with a plan has: the run without one shall differ in recomputation alone
    config["ort_zero"].setdefault("ortmodule", {})["ort_kernels"] = ["*"]
    if memory is not None:
        config["ort_zero"]["memory"] = memory
    model = build(kind)
    if memory == BLOCKS:
        model.gradient_checkpointing_enable({"use_reentrant": stage == 2})
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


# -- what comes of it --------------------------------------------------------------------------------------------------


AUTO = {"recompute": "auto", "budget": "90%"}
CASES = [
    ("zero_1_auto", "gpt2", 1, AUTO, {}),
    ("zero_1_all", "bert", 1, {"recompute": "all"}, {}),
    ("zero_1_plan", "gpt2", 1, {"recompute": "FastGelu+Reshape+:1:1"}, {}),
    ("zero_1_accumulation", "gpt2", 1, AUTO, {"gas": 2}),
    ("zero_2_auto", "bert", 2, AUTO, {}),
    ("zero_2_efficient_gradients", "gpt2", 2, {"recompute": "all"}, {"efficient": True}),
    ("zero_2_efficient_accumulation", "bert", 2, AUTO, {"efficient": True, "gas": 2}),
    ("zero_3_all", "gpt2", 3, {"recompute": "all"}, {}),
    ("zero_3_auto", "bert", 3, {"recompute": "auto", "budget": "96%"}, {}),
    ("zero_1_head_and_loss", MANY_LOGITS, 1, {"recompute": "auto", "budget": "60%"}, {}),
    ("zero_3_head_and_loss", MANY_LOGITS, 3, {"recompute": "auto", "budget": "60%"}, {}),
    ("zero_2_blocks", "bert", 2, BLOCKS, {"efficient": True, "gas": 2}),
    ("zero_3_blocks", "gpt2", 3, BLOCKS, {}),
]


@once
def _launch() -> list[dict]:
    return run_on_ranks(compare, 2, CASES, timeout=800)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_the_same_training(name):
    plans = []
    for report in (found[name] for found in _launch()):
        assert report["losses"] == pytest.approx(report["reference"], abs=1e-5)
        assert report["apart"] <= 1e-5
        status = report["status"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
        assert report["plain"]["memory"] == []
        (decision,) = status["memory"]
        node = name.endswith("head_and_loss")
        assert bool(decision["fused_loss"]) is node
        if node:
            assert status["graphs"]["training"]["kernels"]["fused_loss"] == 1
        elif decision["blocks"] is None:
            assert decision["plan"] and sum(row["actual"] for row in decision["table"]) > 0
        assert decision["predicted_bytes"] < decision["unconstrained_bytes"]
        assert decision["measured_bytes"] > 0
        plans.append(decision["plan"])
    assert plans[0] == plans[1], "the ranks run different plans"


def test_counts_are_places():
    for report in (found["zero_1_plan"] for found in _launch()):
        (row,) = [row for row in report["status"]["memory"][0]["table"] if row["requested"]]
        assert (row["cluster"], row["frequency"], row["requested"], row["actual"]) == ("FastGelu+Reshape+", 2, 1, 1)


def test_checkpointed_blocks_are_computed_again_from_weights_that_are_gathered_in_the_backward():
    for report in (found["zero_3_blocks"] for found in _launch()):
        (decision,) = report["status"]["memory"]
        assert (decision["blocks"]["found"], decision["blocks"]["recomputed"]) == (2, 2)
        assert decision["predicted_bytes"] < 0.8 * decision["unconstrained_bytes"]
        plain, ours = _gathers(report["plain"]), _gathers(report["status"])
        assert ours[0] == plain[0] and ours[1] > plain[1]


def _gathers(status: dict) -> tuple[int, ...]:
    """Return the gathers of the training graph in its forward and in its backward."""
    found = re.search(r"(\d+) gathers forward, (\d+) backward", status["graphs"]["training"]["collectives"])
    return tuple(map(int, found.groups()))


def test_partitioned_weights_are_not_read_again():
    for report in (found["zero_3_all"] for found in _launch()):
        rows = report["status"]["memory"][0]["table"]
        products = [row for row in rows if "Gemm" in row["cluster"]]
        assert products and all(row["actual"] == 0 and "ZeRO-3" in row["note"] for row in products)


REFUSED = [
    ({"recompute": "FastGelu+Reshap+:1:-1"}, None, ["'FastGelu+Reshap+:1'", "did you mean 'FastGelu+Reshape+:1'"]),
    ({"recompute": "auto", "budget": "1MiB"}, None, ["budget of 1 MiB", "at least", "make the batch smaller"]),
    ({"recompute": "plan.json"}, {0: '["FastGelu+Reshape+:1:-1"]'}, ["rank 1", "plan.json cannot be read"]),
    (
        {"recompute": "plan.json"},
        {0: '["FastGelu+Reshape+:1:-1"]', 1: '["Gemm+Reshape+:1:-1"]'},
        ["ranks [1] read another plan than rank 0"],
    ),
    ({"recompute": "plan.json"}, {0: "[1, 2", 1: "[1, 2"}, ["plan.json is not JSON"]),
]


@once
def _refusals() -> list[list[dict]]:
    cases = [(memory, write) for memory, write, _ in REFUSED]
    return run_on_ranks(refused, 2, cases, timeout=400)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_on_all_ranks(number):
    for reports in _refusals():
        report = reports[number]
        assert report["error"] is not None and report["ran"] == 0
        for word in REFUSED[number][2]:
            assert word in report["error"]
