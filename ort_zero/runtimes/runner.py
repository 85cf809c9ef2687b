"""Name what runs a segment or a unit."""

from __future__ import annotations

import enum


class Runner(enum.Enum):
    """What runs a segment or a unit."""

    ONNXRUNTIME = "onnxruntime"
    INDUCTOR = "inductor"
    TORCH = "torch"

    @property
    def title(self) -> str:
        """The name in texts."""
        return {"onnxruntime": "ONNX Runtime", "inductor": "Inductor", "torch": "PyTorch"}[self.value]
