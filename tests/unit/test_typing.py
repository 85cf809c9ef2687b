"""mypy sees through the doors of the package: a wrong keyword in a user's project is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[mypy]
ignore_missing_imports = True
follow_imports = silent
# their types are not what is looked at, and reading them takes most of the time
[mypy-torch.*,numpy.*,transformers.*,onnx.*,pyarrow.*,pydantic.*]
follow_imports = skip
"""
USER = """
import torch

import ort_zero
import ort_zero.checkpoint
from ort_zero import checkpoint, hooks
from ort_zero.checkpoint import verify
from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber, SubscriberBase, inspect_activation

model = torch.nn.Linear(1, 1)
engine = object()

fallbacks: int = ort_zero.status()["fallbacks"]
ort_zero.status(1)  # error
ort_zero.statuss()  # error
ort_zero.enable()
ort_zero.enable(force=True)  # error

ort_zero.checkpoint.aggregate("a", "b", what="weights", max_shard_size="5GB")
ort_zero.checkpoint.aggregate("a", "b", max_shard_sise="5GB")  # error
checkpoint.save(engine, "out", tag="step_1", async_save=True).upper()
checkpoint.save(engine, "out", tagg="step_1")  # error
checkpoint.save(engine, "out").uper()  # error
path, client_state = checkpoint.load(engine, "out", strict=False)
checkpoint.load(engine, "out", stric=False)  # error
checkpoint.wait(engine)
verify("out").ok
verify("out").okay  # error
checkpoint.verfy("out")  # error

GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir="out", end_step=10)])
GlobalSubscriberManager.subscribe(model, StatisticsSubscriber(output_dir="out"))  # error
GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir="out", end_stepp=10)])  # error
GlobalSubscriberManager.subscribe(modle=model, subscribers=[])  # error
inspect_activation("scores", torch.zeros(1))
inspect_activation(torch.zeros(1))  # error
hooks.GlobalSubscriber  # error


class Mine(SubscriberBase):
    start_step = 3
"""


@pytest.mark.seconds
def test_a_wrong_call_in_a_users_project_fails_mypy(tmp_path):
    (tmp_path / "mypy.ini").write_text(CONFIG)
    user = tmp_path / "user.py"
    user.write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache"), "user.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    found = [int(line) for line in re.findall(r"^user\.py:(\d+): error:", done.stdout, flags=re.M)]
    wanted = [number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# error")]
    assert found == wanted and len(wanted) == 14, done.stdout
