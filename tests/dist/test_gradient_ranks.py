"""Two ranks train to the same parameters, whether gradients come at the end of the backward or in the midst of it."""

from __future__ import annotations

import gradient_workers
import pytest
from launched import once

from ort_zero.testing.ranks import run_on_ranks

PARAMETERS = 1e-6

STAGES = [
    *(f"accumulation_and_clipping:{stage}" for stage in range(4)),
    "overlap:1", "overlap:2",
    "two_forwards:1", "two_forwards:2",
    "no_sync:0", "no_sync:1",
    "unused:1", "unused:2",
    "hooks:0", "hooks:2",
    "error_in_a_hook:1", "error_in_a_hook:2",
    "evaluated:2",
    "other_order_on_one_rank:1", "other_order_on_one_rank:2", "other_parameters_on_one_rank:2",
    "penalty:0", "penalty_in_forward:1", "penalty_in_forward:2", "penalty_refused:1", "penalty_refused:2",
]  # fmt: skip
DDP = ["ddp:0", "ddp:1", "ddp_static", "ddp_no_sync:0", "ddp_no_sync:1", "ddp_unused", "ddp_two_forwards",
       "ddp_other_order", "ddp_error_in_a_hook", "ddp_penalty_refused"]  # fmt: skip

REFUSED = "BridgeError: last.weight is used in the loss outside of the model's forward as well"


@once
def _launch(group: str) -> list[dict]:
    return run_on_ranks(gradient_workers.compare, 2, STAGES if group == "stages" else DDP, timeout=280)


def _trained_alike(group: str, name: str) -> list[dict]:
    reports = [report[name] for report in _launch(group)]
    for rank, report in enumerate(reports):
        where = f"{name}, rank {rank}"
        assert "error" not in report, report["error"]
        assert report["apart"] <= PARAMETERS, f"{where}: {report['apart']}"
        assert report["moved"] > 1000 * PARAMETERS, f"{where}: the parameters did not move"
        off, on = (status["graphs"]["training"] for status in report["status"])
        assert all(s["backend"] == "onnxruntime" and s["fallbacks"] == 0 for s in report["status"]), where
        assert on["runs"]["backward"] > 0 and on["reduces"] > 0, f"{where}: nothing was reduced inside of the graph"
        assert off["reduces"] == 0 or off["gathers"] > 0, f"{where}: the option was not off"
        theirs, ours = ({k: v for k, v in s.items() if k not in ("refused", "raised")} for s in report["seen"])
        assert ours == theirs, where
    return reports


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_zero(name):
    for report in _trained_alike("stages", name):
        seen = report["seen"][1]
        if name.startswith("error"):
            assert seen == {"raised": "ArithmeticError: no more gradients"}
        if name.startswith("hooks"):
            assert set(seen["calls"].values()) == {gradient_workers.STEPS}
        if name.startswith("other_parameters"):
            assert seen["refused"].startswith("BridgeError: ranks [1] have gradients of other parameters than rank 0")
        if name.startswith("penalty_refused"):
            assert seen["refused"].startswith(REFUSED)


@pytest.mark.parametrize("name", DDP)
def test_distributed_data_parallel(name):
    for report in _trained_alike("ddp", name):
        seen = report["seen"][1]
        if name == "ddp_unused":
            assert seen["without gradient 0"] == [] and seen["without gradient 1"]
        if "error" in name:
            assert seen == {"raised": "ArithmeticError: no more gradients"}
        if name == "ddp_penalty_refused":
            assert seen["refused"].startswith(REFUSED)
