"""Lightning's own use of torch.compile, with the backend by the name that other libraries list."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("lightning",)
pytestmark = pytest.mark.clients

SCRIPT = """
import json
import torchvision_operators
import lightning
import torch
import ort_zero

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, number):
        return torch.nn.functional.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

model = torch.compile(Regression(), backend="onnxrt")
rows = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4)
trainer = lightning.Trainer(
    max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(model, rows)
(report,) = ort_zero.status()["models"]
print("REPORT", json.dumps({key: report[key] for key in ("backend", "graph_runs")}))
"""


def test_lightning_trains_a_model_compiled_by_name(tmp_path: Path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.partition("REPORT ")[2].splitlines()[0])
    assert report["backend"] == "onnxruntime"
    assert report["graph_runs"]["forward"] >= 3 and report["graph_runs"]["backward"] >= 3
