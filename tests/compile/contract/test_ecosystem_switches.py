"""The backend by the names that other libraries list: Accelerate's and Trainer's switches, torch.compile by name."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from older_versions import older

NEEDS_THE_NAME = pytest.mark.skipif(older("torch", than="2.9"), reason="this torch has a backend onnxrt itself")
REPORT = """
import json, ort_zero
(model,) = ort_zero.status()["models"]
print("REPORT", json.dumps({key: model[key] for key in ("backend", "graph_runs")}))
"""


def run(script: str, folder: Path, *launcher: str) -> dict:
    """Run a script in a process of its own, and return what it says of the compiled model."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script) + REPORT)
    command = [sys.executable, *launcher, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("REPORT ")[2].splitlines()[0])


@NEEDS_THE_NAME
def test_accelerate_launch_with_dynamo_backend_onnxrt(tmp_path: Path):
    report = run(
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
        "--dynamo_backend",
        "onnxrt",
    )
    assert report == {"backend": "onnxruntime", "graph_runs": {"forward": 3, "backward": 3}}


@NEEDS_THE_NAME
def test_trainer_with_torch_compile_backend(tmp_path: Path):
    report = run(
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
    assert report["backend"] == "onnxruntime"
    assert report["graph_runs"]["forward"] >= 3 and report["graph_runs"]["backward"] >= 3
