"""Copies of checkpoints that DeepSpeed itself has written (``tests/golden/make_checkpoints.py``), to be changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TENSORS = 22
"""Masters, moments, frozen parameters and buffers of each of them."""


def write(
    folder: str | Path, stage: int, change: Callable[[str, dict[str, Any]], None] | None = None
) -> dict[str, torch.Tensor]:
    """Write the checkpoint of two ranks into `folder`, which is made; return its values by ``kind/name``.

    Args:
        folder: its parent may be missing too.
        stage: 2 or 3.
        change: is called with each file's name and content before it is written anew.
    """
    shutil.copytree(GOLDEN / f"deepspeed_zero{stage}" / "saved", folder)
    for path in sorted(Path(folder).iterdir()) if change is not None else ():
        content = torch.load(path, weights_only=False)
        change(path.name, content)
        torch.save(content, path)
    return load_file(GOLDEN / f"deepspeed_zero{stage}" / "expected.safetensors")
