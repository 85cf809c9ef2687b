"""Define the phases of a step, the names in a run's folder, and the description of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SKETCH = 64
"""Number of numbers in a sketch."""
FIRST = 8
"""Number of first values of a tensor in its statistics."""
FORMAT = "ort_zero statistics"
"""Value of ``format`` in the manifest of a rank's folder."""
FORMAT_VERSION = 1
FILE = "statistics.arrow"
"""Name of the file with the statistics in a rank's folder."""
MANIFEST = "manifest.json"


class Phase(IntEnum):
    """The phase of a step that a record's tensor belongs to; phases are compared in this order."""

    PARAMETER = 0
    """A parameter at the beginning of the step."""
    FORWARD = 1
    """An input or output of a module, or a tensor passed to ``inspect_activation``."""
    BACKWARD = 2
    """The gradient of a tensor of the phase FORWARD."""
    PARAMETER_GRADIENT = 3
    """The gradient of a parameter on this rank, before gradients are reduced or accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The description of one run, from the manifests of its ranks."""

    path: str
    run_id: str
    backend: str
    """The backend that ran the model: ``"onnxruntime"`` or ``"torch"``."""
    world_size: int
    zero_stage: int
    dtype: str
    model: str
    """Class name of the root module."""
    steps: tuple[int, ...]
    """Numbers of the full steps that every rank has."""
