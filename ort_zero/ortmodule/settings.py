"""Hold how models run in onnxruntime-training."""

from __future__ import annotations

from dataclasses import dataclass

from ort_zero.ortmodule import memory
from ort_zero.ortmodule.upstream.building import BuildOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How models run."""

    raises: bool = False
    """A graph that ONNX Runtime cannot run raises; otherwise PyTorch runs the graph."""
    times_units: bool = True
    """Units that are much slower in ONNX Runtime go back to PyTorch."""
    build: BuildOptions = BuildOptions()
    recompute: memory.Wanted | None = None
    """What backwards compute again; None keeps all."""
