"""docs/tutorial.md: the commands run, and their output says what the text around them says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(tmp_path):
    spec = importlib.util.spec_from_file_location("make_tutorial", DOCS / "make_tutorial.py")
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    page, failed = tutorial.run((DOCS / "tutorial.md").read_text(), tmp_path)
    assert failed == []
    plain, ours, whole, resumed, *_ = re.findall(r"^```text\n(.*?)^```", page, flags=re.M | re.S)
    losses = [re.findall(r"^step (\d+) loss (\S+)$", text, flags=re.M) for text in (plain, ours, resumed)]
    assert [int(step) for step, _ in losses[0]] == [int(step) for step, _ in losses[1]] == [10, 20]
    assert all(abs(float(a) - float(b)) < 2e-3 for (_, a), (_, b) in zip(losses[0], losses[1], strict=True))
    assert [int(step) for step, _ in losses[2]] == [30, 40] and "ok: run/global_step20" in whole
    assert "\nsame: " in f"\n{page}" and "differs: step 0" in page and ".mlp.act adds the error" in page
