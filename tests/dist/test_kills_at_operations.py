"""Saves, aggregations and conversions that are killed at any of their file operations, on one rank or on all.

No mixture of the old and the new result appears, nobody hangs, and a run that
is not killed leaves nothing of the others behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KILLS = {"save": 150, "aggregate": 150, "convert": 100}
"""Kills of each kind in the slow test, half of them on one rank alone."""


def kill(kind: str, ranks: int, count: int, folder: Path, seed: int, timeout: float = 900) -> dict[str, Any]:
    """Return the report of a run of ``kill_at_operations.py``."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests", ROOT / "tests/unit", ROOT / "tests/dist"))
    program = Path(__file__).with_name("kill_at_operations.py")
    done = subprocess.run(
        [sys.executable, program, kind, str(ranks), str(count), folder, str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["killed"] == count and report["old"] + report["new"] == count, report
    return report


@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_some_operations(tmp_path, kind):
    report = kill(kind, 2, 12, tmp_path, 1)
    assert report["survivors"] and report["all"] and report["old"], report


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_most_operations(tmp_path, kind, ranks):
    count = KILLS[kind] // 2
    report = kill(kind, ranks, count, tmp_path, 16, 1700)
    assert report["operations"] > count // 2 and report["old"] > count // 10 and report["new"] > count // 20, report
    assert ranks == 1 or (report["survivors"] > count // 5 and report["all"] > count // 5), report
