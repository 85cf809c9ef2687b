"""The statistics of one tensor, the record that they are a part of, and what a run was."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SKETCH = 64
"""Number of numbers in a sketch."""
FIRST = 8
"""Number of a tensor's first values that are in its statistics."""
FORMAT = "ort_zero statistics"
"""Value of ``format`` in the manifest of a folder that is ours."""
FORMAT_VERSION = 1
FILE = "statistics.arrow"
"""Name of the one file in a rank's folder."""
MANIFEST = "manifest.json"


class Phase(IntEnum):
    """The subject of a record; within a step the phases are compared in this order."""

    PARAMETER = 0
    """A parameter as the step begins."""
    FORWARD = 1
    """An input or output of a module, or a tensor given to ``inspect_activation``."""
    BACKWARD = 2
    """The gradient of such a tensor."""
    PARAMETER_GRADIENT = 3
    """The gradient of a parameter, of this rank, before it is reduced or accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The values of one tensor in numbers. NaN and inf are counted, and left out of everything else.

    Of no finite values at all (an empty tensor, for one) min, max, mean and std are NaN, abs_mean and l2 are 0.
    """

    elements: int
    """Number of elements that these numbers cover: all of the tensor, or fewer where it was sampled."""
    min: float
    max: float
    mean: float
    std: float
    """Standard deviation of the population: the mean square deviation's root (``numpy.std``)."""
    abs_mean: float
    l2: float
    """Euclidean norm: the root of the sum of squares."""
    negative: int
    positive: int
    zero: int
    nan: int
    inf: int
    first: tuple[float, ...]
    """The first values, at most :data:`FIRST`, NaN and inf as they are."""
    sketch: tuple[float, ...]
    """Count sketch (Charikar, Chen, Farach-Colton 2002): element ``i`` of the flattened tensor is added to number
    ``i % SKETCH`` with a sign that depends on ``i`` alone. For two tensors of one shape the l2 norm of the difference
    of their sketches estimates the l2 norm of their difference, within about 10 %; sketches of disjoint parts of one
    tensor add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a statistics file.

    Within a step, ``order`` numbers the records of a phase as the module code reaches them: rows of the phase FORWARD
    have 0, 1, 2, ...; a row of the phase BACKWARD carries the ``order`` of the forward row whose gradient it is (so the
    gradient that is computed first has the highest). Parameters and their gradients are numbered in the order of
    ``named_parameters()``.

    A module call has a number, ``call``, counted from 0 within the step when the call begins; the root's is 0.
    ``caller`` is the call within which it happened, -1 for the root. All inputs and outputs of the call have its
    number, so the calls of a step are a tree. Rows of outputs follow the rows of all that happened inside.

    A tensor that had a row before in this step (an output that goes on as the next module's input, a block that
    returns what its last child returned) is not measured again: its row has ``source`` set to the ``order`` of that
    first row, and ``statistics`` None. Its gradient is the one of that first row.
    """

    step: int
    phase: Phase
    order: int
    call: int
    """Number of the module's call in the step; -1 in rows of parameters."""
    caller: int
    module: str
    """Path of the module from the root without wrappers' prefixes; empty for the root itself. For parameters, path of
    their owner."""
    occurrence: int
    """Number of the call among those of the module in the step, from 1; 1 for parameters."""
    kind: str
    """Kind of the tensor: ``"input"``, ``"output"``, ``"inspect"`` or ``"parameter"``."""
    slot: str
    """Name of the tensor among those of its kind: ``""`` for a single one, ``"[0]"``, ``".logits"``, ``".past[1][0]"``,
    ``".input_ids"``; the name given to ``inspect_activation``; the parameter's own name."""
    source: int
    """Order of the row that has the statistics of the same tensor; -1 if the row has statistics of its own."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"int64"``, ..."""
    partitioned: bool
    """True if other ranks hold the rest of the tensor (ZeRO-3): sketches, sums and counts of all ranks add up."""
    statistics: Statistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run, from the manifests of its ranks."""

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
    """Full steps that every rank has."""
