"""Makes the stored statistics in ``tests/golden``; run it once for each new version of the file format.

``python tests/unit/statistics_golden.py`` writes the folder of the version that this ort_zero writes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from ort_zero.statistics.records import FORMAT_VERSION
from ort_zero.statistics.run_folder import LOCK

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
STEPS = 2


class Net(nn.Module):
    """Two layers, and a value of its own; with a fault, the activation is scaled."""

    def __init__(self, fault: bool):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)
        self.fault = fault
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.75, parameter.numel()).view(parameter.shape) + 0.125 * i)
        if fault:
            self.act.forward = lambda x: 1.01 * torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        return self.last(self.act(inspect_activation("hidden", self.first(x))))


def make(folder: Path) -> None:
    """Write two runs, ``right`` and ``wrong``, into a folder, in place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("right", "wrong"):
        model = Net(fault=name == "wrong")
        subscribed = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder / name))])
        for step in range(STEPS):
            model(torch.tensor([[1.0, -2.0], [0.5, 3.0]]) + step).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.0625 * parameter.grad
                    parameter.grad = None
        subscribed.remove()
        (folder / name / LOCK).unlink(missing_ok=True)


if __name__ == "__main__":
    make(GOLDEN / f"statistics_v{FORMAT_VERSION}")
