"""The backend by the names that torch and other libraries list, after an installation, also without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from older_versions import older

NEEDS_THE_NAME = pytest.mark.skipif(older("torch", than="2.9"), reason="this torch has a backend onnxrt itself")
REPORT = """
import json, sys, ort_zero
(model,) = ort_zero.status()["models"]
print("REPORT", json.dumps({**model, "lowerings": "torch._inductor.lowering" in sys.modules}))
"""


def run(script: str, folder: Path, *launcher: str, **env: str) -> dict:
    """Run a script in a process of its own, and return what it says of the compiled model."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script) + REPORT)
    clean = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, *launcher, str(file)],
        capture_output=True, text=True, timeout=300, cwd=folder, env={**clean, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("REPORT ")[2].splitlines()[0])


@pytest.mark.parametrize("name", ["ort_zero", pytest.param("onnxrt", marks=NEEDS_THE_NAME)])
def test_torch_compile_finds_the_backend_and_trains_without_a_compiler(tmp_path: Path, name: str):
    (tmp_path / "bin").mkdir()
    script = f"""
        import shutil, torch
        assert shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("cc") is None
        assert {{"ort_zero", "onnxrt"}} <= set(torch._dynamo.list_backends(None))
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)]
        model = torch.nn.Sequential(*layers)
        compiled = torch.compile(model, backend={name!r}, options={{"place": "ort"}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, losses = torch.randn(8, 16), []
        for _ in range(3):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] > losses[1] > losses[2]
        """
    status = run(script, tmp_path, PATH=str(tmp_path / "bin"), ORT_ZERO_CACHE_DIR=str(tmp_path / "cache"))
    assert not status["lowerings"], "Inductor's lowerings take more than a second of the first step"
    assert status["engine"] == "compile" and status["backend"] == "onnxruntime" and status["fallbacks"] == 0
    assert status["graph_runs"]["forward"] == status["graph_runs"]["backward"] == 3
    compiled = status["compiled"]
    assert compiled["segments"] > 0 and compiled["segments_in_torch"] == 0 and compiled["flop_share"] > 0.5


def test_both_names_lead_to_the_same_function():
    points = metadata.entry_points(group="torch_dynamo_backends")
    found = {point.name: point for point in points if point.name in ("ort_zero", "onnxrt")}
    assert found.keys() == {"ort_zero", "onnxrt"}
    assert found["ort_zero"].load() is found["onnxrt"].load()


@NEEDS_THE_NAME
def test_accelerate_launch_with_dynamo_backend_onnxrt(tmp_path: Path):
    status = run(
        """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
        for _ in range(3):
            accelerator.backward(model(torch.randn(16, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        """,
        tmp_path,
        *"-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no".split(),
        *("--dynamo_backend", "onnxrt"),
    )
    assert status["backend"] == "onnxruntime" and status["graph_runs"] == {"forward": 3, "backward": 3}


@NEEDS_THE_NAME
def test_trainer_with_torch_compile_backend(tmp_path: Path):
    status = run(
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, use_cache=False)
        rows = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.randint(0, 50, (8,))} for _ in range(12)]
        arguments = TrainingArguments(
            "out", max_steps=3, per_device_train_batch_size=4, torch_compile=True, torch_compile_backend="onnxrt",
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows).train()
        """,
        tmp_path,
    )
    assert status["backend"] == "onnxruntime"
    assert status["graph_runs"]["forward"] >= 3 and status["graph_runs"]["backward"] >= 3
