"""Programs that ask for the backend by their library's own switch of torch.compile, without the section.

``accelerate launch`` and a plain Trainer are in tests/compile/contract/test_backend_by_name.py.
"""

from __future__ import annotations

import pytest
import torch
from harness import Result, Run, programs
from torch import nn
from torch.nn import functional as F

PACKAGES = ("lightning",)
pytestmark = pytest.mark.clients

NAME = "onnxrt"


def lightning_module(run: Run) -> Result:
    """Lightning's Trainer fits a LightningModule that `torch.compile` has taken"""
    import lightning

    losses: list[float] = []

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

        def training_step(self, batch, number):
            loss = F.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", devices=1, **quiet)
    module = Regression()
    fitted = torch.compile(module, backend=NAME) if run.backend == "ort" else module
    trainer.fit(fitted, torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4))
    return Result(losses, alive=module)


test_programs_of_one_process = programs(lightning_module, stages=[0], ranks=1)
