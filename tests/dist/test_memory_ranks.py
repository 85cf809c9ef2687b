"""Two ranks with recomputation: the losses of a run without it, under every ZeRO stage; bad plans stop all ranks."""

from __future__ import annotations

import memory_workers
import pytest
from launched import once

from ort_zero.testing.ranks import run_on_ranks

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
]


@once
def _launch() -> list[dict]:
    return run_on_ranks(memory_workers.compare, 2, CASES, timeout=280)


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
        assert decision["plan"] and sum(row["actual"] for row in decision["table"]) > 0
        assert decision["predicted_bytes"] < decision["unconstrained_bytes"]
        assert decision["measured_bytes"] > 0
        plans.append(decision["plan"])
    assert plans[0] == plans[1], "the ranks run different plans"


def test_counts_are_places():
    for report in (found["zero_1_plan"] for found in _launch()):
        (row,) = [row for row in report["status"]["memory"][0]["table"] if row["requested"]]
        assert (row["cluster"], row["frequency"], row["requested"], row["actual"]) == ("FastGelu+Reshape+", 2, 1, 1)


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
    return run_on_ranks(memory_workers.refused, 2, cases, timeout=120)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_on_all_ranks(number):
    for reports in _refusals():
        report = reports[number]
        assert report["error"] is not None and report["ran"] == 0
        for word in REFUSED[number][2]:
            assert word in report["error"]
