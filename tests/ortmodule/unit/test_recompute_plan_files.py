"""Plan files of earlier versions, under tests/golden, are read by this one; what is no plan file is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ort_zero.ortmodule.recompute.options import read_plan
from ort_zero.ortmodule.recompute.plan_store import FORMAT, PlanStore

GOLDEN = Path(__file__).parents[1] / "golden"
COUNTS = {"FastGelu+:1": 8, "Gemm+Reshape+Split+Reshape+Transpose+:1": 4}


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.glob("recompute_plan_v*")))
def test_plans_of_each_version_are_read(folder):
    assert PlanStore(GOLDEN / folder).load("0123") == COUNTS
    assert [str(item) for item in read_plan(GOLDEN / folder / "plan.json")] == [f"{k}:{n}" for k, n in COUNTS.items()]


def test_there_is_a_file_of_the_format_that_is_written():
    file = GOLDEN / "recompute_plan_v1" / "0123.plan.json"
    assert json.loads(file.read_text())["format"] == FORMAT


@pytest.mark.parametrize(
    "damage", [{"format": "ort_zero.other"}, {"counts": ["FastGelu+:1"]}, {"counts": {"FastGelu+:1": "all"}}, None]
)
def test_what_is_no_plan_is_planned_anew(tmp_path, damage):
    store = PlanStore(tmp_path)
    assert store.load("0123") is None
    shutil.copy(GOLDEN / "recompute_plan_v1" / "0123.plan.json", store.file("0123"))
    assert store.load("0123") == COUNTS
    content = json.loads(store.file("0123").read_text())
    store.file("0123").write_text(json.dumps(content | damage) if damage else '{"format')
    assert store.load("0123") is None


def test_why_another_graph_was_planned_is_kept_and_is_no_plan(tmp_path):
    store = PlanStore(tmp_path)
    assert store.refusal("0123") == ""
    store.save_refusal("0123", "32 MiB of logits")
    assert store.refusal("0123") == "32 MiB of logits" and store.load("0123") is None
    store.file("0123").write_text("{")
    assert store.refusal("0123") == ""
