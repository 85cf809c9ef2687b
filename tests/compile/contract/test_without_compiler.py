"""The bare backend: ``torch.compile`` finds it after an installation, and it trains on a machine without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

TRAIN = """
import json, shutil, sys
assert shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("cc") is None
import torch
import ort_zero
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)]
model = torch.nn.Sequential(*layers)
compiled = torch.compile(model, backend={name!r}, options={{"place": "ort"}})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(8, 16)
losses = []
for _ in range(3):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
(status,) = ort_zero.status()["models"]
lowerings = "torch._inductor.lowering" in sys.modules
print(json.dumps({{"losses": losses, "status": status, "lowerings": lowerings}}))
"""


def run(code: str, **env: str) -> str:
    """Run code in a fresh process, and return the last line of its output."""
    clean = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**clean, **env}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["ort_zero", "onnxrt"])
def test_the_bare_backend_trains_without_a_compiler(tmp_path: Path, name: str):
    if name == "onnxrt" and _is_torchs(name):
        pytest.skip("this torch has a backend of that name itself")
    empty = tmp_path / "bin"
    empty.mkdir()
    result = json.loads(run(TRAIN.format(name=name), PATH=str(empty), ORT_ZERO_CACHE_DIR=str(tmp_path / "cache")))
    status, losses = result["status"], result["losses"]
    assert losses[0] > losses[1] > losses[2]
    assert not result["lowerings"], "Inductor's lowerings take more than a second of the first step"
    assert status["engine"] == "compile" and status["backend"] == "onnxruntime" and status["fallbacks"] == 0
    assert status["graph_runs"]["forward"] == status["graph_runs"]["backward"] == 3
    compiled = status["compiled"]
    assert compiled["segments"] > 0 and compiled["segments_in_torch"] == 0 and compiled["flop_share"] > 0.5


def test_torch_lists_the_backends_of_the_installation():
    listed = json.loads(run("import json, torch._dynamo; print(json.dumps(torch._dynamo.list_backends(None)))"))
    assert "ort_zero" in listed and "onnxrt" in listed


def test_both_names_lead_to_the_same_function():
    points = metadata.entry_points(group="torch_dynamo_backends")
    found = {point.name: point for point in points if point.name in ("ort_zero", "onnxrt")}
    assert found.keys() == {"ort_zero", "onnxrt"}
    assert found["ort_zero"].load() is found["onnxrt"].load()


def _is_torchs(name: str) -> bool:
    """Return whether torch itself has registered a backend of this name, as 2.6 to 2.8 do."""
    from torch._dynamo.backends import registry

    registry.list_backends(None)
    function = registry._COMPILER_FNS.get(name)
    return function is not None and function.__module__.startswith("torch.")
