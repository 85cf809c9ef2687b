"""Ranks are killed or interrupted at any moment of a save: every complete checkpoint stays complete, nobody waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLED = Path(__file__).with_name("save_until_killed.py")


def kill_rounds(how: str, count: int, folder: Path, seed: int, timeout: float) -> dict[str, Any]:
    """Return the report of :func:`rounds`, run in a process of its own."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, KILLED, how, str(count), folder, str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
    )
    outputs = "\n".join(f"{p}:\n{p.read_text()[-2000:]}" for p in sorted(folder.glob("round_*/output_*")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{outputs}"
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_any_moment(tmp_path):
    report = kill_rounds("kill", 8, tmp_path, 1, 280)
    assert report["rounds"] == 8 and 0 < report["one"] < 8 and report["background"] == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_many_moments(tmp_path):
    report = kill_rounds("kill", 200, tmp_path, 2, 3500)
    assert report["rounds"] == 200 and report["cut"] > 20


def test_killed_while_the_manifest_is_about_to_be_written(tmp_path):
    assert kill_rounds("linger", 2, tmp_path, 3, 120)["rounds"] == 2


def test_interrupted_at_any_moment(tmp_path):
    assert kill_rounds("interrupt", 6, tmp_path, 4, 200)["rounds"] == 6
