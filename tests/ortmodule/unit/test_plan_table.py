"""The table of a decision, and the plan's forms: frozen by the files in golden/, which are what users parse and paste.

After a change on purpose: ``UPDATE_GOLDEN=1 python -m pytest tests/unit/test_plan_table.py``, and look at the diff.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ort_zero.ortmodule.recompute import options, output_files, plan_table
from ort_zero.ortmodule.recompute.decision import Decision, Row
from ort_zero.ortmodule.recompute.peak_memory import Peak
from ort_zero.ortmodule.recompute.plan_store import PlanStore
from ort_zero.ortmodule.recompute.planner import Point

GOLDEN = Path(__file__).parent / "golden"
MIB = 2**20
GELU, NORM, LONG = "FastGelu+", "LayerNormalization+", "Gemm+Reshape+Split+Reshape+Transpose+"


def decision() -> Decision:
    """Return a decision in which every column has something to say."""
    none = Point((), 150 * MIB, 180 * MIB, 0.0, "MatMul_7_Grad")
    half = Point(((f"{GELU}:1", 8),), 110 * MIB, 130 * MIB, 0.002, "MatMul_3_Grad")
    least = Point(((f"{GELU}:1", 8), (f"{LONG}:1", 4)), 80 * MIB, 96 * MIB, 0.009, "loss_Grad")
    rows = [
        Row(GELU, 1, 8, 64 * MIB, "8 x (batch*seq*2048) * 4", -1, 8, 0.002),
        Row(LONG, 1, 16, 48 * MIB, "16 x (batch*8*seq*32) * 4 + 8 x (batch*8*32*seq) * 4", 4, 4, 0.01),
        Row(NORM, 2, 5, 5 * MIB // 2, "5 x (batch*seq*512) * 4", 0, 0, 0.001, "2 read weights that ZeRO-3 partitions"),
    ]
    return Decision(
        "auto", rows, [f"{GELU}:1:8", f"{LONG}:1:4"], none, least, least, 100 * MIB, [none, half, least],
        {"batch": 4, "seq": 128}, seconds=1.25, plan_file="plans/0123.plan.json",
        predicted=Peak(80 * MIB, 97 * MIB, 3, "loss_Grad", 96 * MIB), measured=95 * MIB,
    )  # fmt: skip


def same_as_golden(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_the_table_as_text():
    same_as_golden("memory_table.txt", plan_table.text(decision().as_dict()) + "\n")


def test_the_table_as_json():
    same_as_golden("memory_table.json", json.dumps(decision().as_dict(), indent=1) + "\n")


@pytest.mark.parametrize("width", [100])
def test_long_names_are_wrapped_to_the_width(width):
    text = plan_table.text(decision().as_dict(), width)
    same_as_golden("memory_table_narrow.txt", text + "\n")
    assert max(map(len, text.splitlines())) <= width
    # nothing is lost by it
    column = [line.split("  ")[0] for line in text.splitlines() if line[:1].isalpha()]
    assert LONG in "".join(column)


def test_the_plan_that_is_pasted_is_the_plan():
    made = decision()
    for width in (None, 60):
        lines = plan_table.plan_lines(made.plan, width)
        pasted = json.loads("{" + "".join(lines).removeprefix("plan: ") + "}")
        assert pasted["memory"]["recompute"] == made.plan
    assert plan_table.plan_lines([]) == ["plan: nothing is computed again"]


def test_the_file_of_a_plan_is_read_back(tmp_path):
    file = tmp_path / "plan.json"
    output_files.write_plan_file(file, decision().plan)
    same_as_golden("memory_plan.json", file.read_text())
    assert [str(item) for item in options.read_plan(file)] == decision().plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_of_a_stored_plan(tmp_path):
    counts, frequencies = {f"{GELU}:1": 8, f"{LONG}:1": 4}, {f"{GELU}:1": 8, f"{LONG}:1": 16}
    unconstrained = decision().unconstrained.resident
    stored = PlanStore(tmp_path).save(
        "0123", counts, budget=100 * MIB, unconstrained=unconstrained, frequencies=frequencies
    )
    same_as_golden("memory_kept_plan.json", Path(stored).read_text() + "\n")


def test_what_a_decision_may_lack_is_left_out():
    bare = replace(decision(), measured=None, budget=None, least=None, rows=[], plan=[], predicted=None)
    text = plan_table.text(bare.as_dict())
    assert "measured" not in text and "budget" not in text and "least" not in text
    assert "nothing that could be computed again" in text and "plan: nothing" in text


def test_a_peak_above_the_budget_is_said():
    assert "exceeded" in plan_table.text(replace(decision(), measured=101 * MIB).as_dict())
    assert "exceeded" not in plan_table.text(decision().as_dict())


@pytest.mark.parametrize(
    ("share", "words"), [(0.001, "as predicted"), (0.12, "12% above the predicted one"), (-0.3, "30% below")]
)
def test_a_difference_is_said_in_words(share, words):
    assert plan_table.against(share).startswith(words)


def test_a_table_without_room_keeps_its_words():
    lines = plan_table.aligned(("cluster", "actual"), [("A" * 40 + "+", "1")], 10)
    assert "".join(line[:16].rstrip() for line in lines[2:]) == "A" * 40 + "+"
