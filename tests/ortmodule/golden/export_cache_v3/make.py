"""Makes the stored entry of the export cache that tests/unit/test_export_cache_golden.py reads.

A new version of the format gets a folder of its own, in which this script is run once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.runtime.export_cache import cache_key
from ort_zero.ortmodule.wrap import wrap_model


class TwoLayers(nn.Module):
    """Has a structure among its results, and reads a value of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> dict[str, torch.Tensor]:
        y = self.last(torch.relu(self.first(x))) * scale
        return {"y": y, "loss": y.square().mean()}


def make(folder: Path) -> None:
    """Write an entry into `folder`."""
    torch.manual_seed(0)
    cache_key._cpu = lambda: "any"  # of no importance here
    _, wrapped = wrap_model(TwoLayers(), config.OrtModuleConfig(cache_dir=str(folder)), stage=0)
    wrapped(torch.ones(2, 3), scale=0.5)["loss"].backward()
    for optimized in folder.glob("*.session"):  # the graph is enough
        optimized.unlink()


if __name__ == "__main__":
    make(Path(__file__).parent)
