"""Every test is collected by whoever runs pytest: a folder that is left out is left out without a word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tests_are_collected_from_every_folder_and_slow_ones_are_found():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    slow, total = map(int, re.search(r"^(\d+)/(\d+) tests collected", done.stdout, re.M).groups())
    assert slow > 60 and total > 1000, (slow, total)
    assert len(set(re.findall(r"^tests/dist/(test_\w+)\.py::", done.stdout, re.M))) > 8, done.stdout
