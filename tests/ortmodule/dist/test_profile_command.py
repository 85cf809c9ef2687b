"""``ort-zero profile`` with scripts that train: an engine on two ranks under ZeRO-3, and an ORTModule by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rank_processes.ranks import free_port

ENGINE = """\
import sys
import deepspeed, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "ort_zero": {},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
rows = torch.randn(8, 64)
try:
    for step in range(100):
        loss = engine(rows).square().mean()
        engine.backward(loss)
        engine.step()
finally:
    with open("ended", "a") as file:
        file.write(f"{step}\\n")
"""
PLAIN = """\
import torch
from onnxruntime.training.ortmodule import ORTModule

model = ORTModule(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):  # ends before all steps without profilers are done
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
    optimizer.step()
"""


def profiled(folder, script: str, *more: str) -> dict:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "ort_zero", "profile", "--script", "train.py", "--json", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def seconds(side: dict, *, kind: str) -> float:
    return sum(part["seconds"] for part in side["parts"] if part["kind"] == kind)


def names(side: dict) -> set[str]:
    return {part["name"] for part in side["parts"]}


def assert_whole(side: dict) -> None:
    """Assert that the parts are no longer than a step; the faster half of the steps counts."""
    total = sum(part["seconds"] for part in side["parts"])
    assert 0 < total <= 1.05 * side["profiled_seconds"]
    assert all(part["seconds"] > -1e-4 for part in side["parts"])


def test_two_ranks_under_zero_3(tmp_path):
    launcher = f"torchrun --nproc_per_node 2 --master_port {free_port()}"
    found = profiled(tmp_path, ENGINE, "--launcher", launcher, "--steps", "2", "--html", "profile.html")
    ours, theirs = found["ort"], found["torch"]
    assert found["ranks"] == ours["ranks"] == theirs["ranks"] == 2 and found["model"] == "Sequential"
    for side in (ours, theirs):
        assert_whole(side)
        assert all(seconds(side, kind=kind) > 0 for kind in ("kernels", "gather", "reduce", "optimizer", "Python"))
    # which kernel a node gets depends on the processor (docs/kernels.md)
    assert names(ours) & {"Gemm", "FusedMatMul"} and names(ours) & {"Gelu", "aten::gelu"} and ours["nodes"] > 10
    assert ours["python_ops"] > 0 and seconds(ours, kind="executor") > 0
    assert names(theirs) & {"aten::mm", "aten::addmm"} and "aten::gelu" in names(theirs) and not theirs["nodes"]
    assert seconds(theirs, kind="executor") == 0
    # three to warm up, two profiled, two without: both backends on both ranks end at the eighth call
    assert (tmp_path / "ended").read_text().split() == ["7"] * 4
    assert len(found["differences"]) >= 5 and (tmp_path / "profile.html").stat().st_size > 3000


def test_an_ortmodule_by_itself_whose_script_ends_early(tmp_path):
    found = profiled(tmp_path, PLAIN, "--steps", "4")
    ours, theirs = found["ort"], found["torch"]
    for side in (ours, theirs):
        assert_whole(side)
        assert seconds(side, kind="optimizer") > 0 and seconds(side, kind="gather") == 0
        assert side["timed_seconds"] is None or side["timed_seconds"] > 0
        assert "aten::nll_loss_forward" in names(side)  # the script's own, in both
    assert names(ours) & {"Gemm", "FusedMatMul"} and "aten::addmm" in names(theirs)
    assert "aten::relu" in names(theirs) and "aten::relu" not in names(ours)


def test_a_fallback_is_no_profile_of_onnx_runtime(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, ort_zero\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise ValueError('no export of this')\n"
        "model = ort_zero.wrap(Net(4, 4), ortmodule={'fallback': 'warn'})\n"
        "model(torch.ones(4)).sum().backward()\n"
    )
    command = [sys.executable, "-m", "ort_zero", "profile", "--script", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "no export of this" in done.stderr, done.stderr


@pytest.fixture(autouse=True)
def _no_section_of_other_tests(monkeypatch):
    monkeypatch.delenv("ORT_ZERO_PROFILE", raising=False)
