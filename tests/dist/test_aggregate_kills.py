"""An aggregation that is killed at any moment leaves no half of a file under a final name, and can be run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
import checkpoint_files
from safetensors.torch import load_file
from ort_zero.checkpoint.aggregation.aggregation import aggregate

src, dst = sys.argv[2] + "/src", Path(sys.argv[2] + "/dst")
tensors = {("master", f"w{i}"): torch.full((1 << 20,), float(i)) for i in range(12)}
checkpoint_files.write(src, tensors, aliases={}, frozen=[], optimizer=None)
started = time.monotonic()
aggregate(src, str(dst), max_shard_size=8 << 20, progress=False)
duration = time.monotonic() - started
whole = {p.name for p in dst.iterdir()}
moments, cut, left, interim, seen = random.Random(int(sys.argv[4])), 0, 0, 0, False
for path in dst.iterdir():
    path.unlink()
for number in range(int(sys.argv[3])):
    pid = os.fork()
    if not pid:
        fresh = not any(not name.endswith(".partial") for name in os.listdir(dst))
        aggregate(src, str(dst), max_shard_size=8 << 20, overwrite=not fresh, progress=False)
        os._exit(0)
    # every other one while the files get their names
    time.sleep(moments.uniform(0.7 * duration if number % 2 else 0, duration))
    os.kill(pid, signal.SIGKILL)
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    cut += killed
    # most kills must come before the end, and the first aggregation may have taken far longer than the next ones
    duration *= 1.03 if killed else 0.9
    names = {p.name for p in dst.iterdir()}
    left += any(n.endswith(".partial") for n in names)
    loadable = "model.safetensors.index.json" in names
    assert loadable or not seen, "the old output went before the new one was there"
    seen |= loadable
    if loadable:
        table = json.loads((dst / "model.safetensors.index.json").read_text())["weight_map"]
        interim += any(name not in whole for name in table.values())
        assert set(table.values()) <= names and len(table) == 12
        for name in set(table.values()):
            stored = load_file(dst / name)
            for key in (key for key, other in table.items() if other == name):
                assert bool((stored[key] == int(key[1:])).all()), (name, key)
aggregate(src, str(dst), max_shard_size=8 << 20, overwrite=True, progress=False)
print(json.dumps({"cut": cut, "left": left, "interim": interim, "same": {p.name for p in dst.iterdir()} == whole}))
"""


def kill(folder: Path, count: int, seed: int, timeout: float) -> dict[str, Any]:
    """Return the report of `count` aggregations that were killed."""
    unit = Path(__file__).parents[1] / "unit"
    command = [sys.executable, "-c", KILLER, str(unit), str(folder), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    print(f"seed {seed}")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_killed_at_any_moment(tmp_path):
    report = kill(tmp_path, 40, 0, 200)
    assert report["cut"] >= 20 and report["left"] > 0 and report["same"], report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_many_moments(tmp_path):
    report = kill(tmp_path, 100, 5, 850)
    assert report["cut"] >= 50 and report["left"] > 0 and report["same"], report
