"""Define the statistics of one tensor, the record of one tensor in a step, and the description of a run."""

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
class Statistics:
    """The statistics of one tensor. NaN and inf are counted, and left out of all other numbers.

    A tensor without finite values, such as an empty one, has min, max, mean and std NaN, abs_mean and l2 0.
    """

    elements: int
    """Number of measured elements: all elements of the tensor, or the elements of a sample."""
    min: float
    max: float
    mean: float
    std: float
    """Standard deviation of the population, as ``numpy.std`` returns it."""
    abs_mean: float
    l2: float
    """Euclidean norm: the square root of the sum of squares."""
    negative: int
    positive: int
    zero: int
    nan: int
    inf: int
    first: tuple[float, ...]
    """The first values, at most :data:`FIRST`, including NaN and inf."""
    sketch: tuple[float, ...]
    """Count sketch (Charikar, Chen, Farach-Colton 2002): element ``i`` of the flattened tensor is added to number
    ``i % SKETCH`` with a sign that depends on ``i`` alone. The l2 norm of the difference of two sketches estimates the
    l2 norm of the difference of two tensors of one shape, within about 10 %. The sketch of a tensor is the sum of the
    sketches of its disjoint parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a statistics file.

    Within a step, ``order`` numbers the records of a phase as the module code reaches the tensors: 0, 1, 2, ... in the
    phase FORWARD. A gradient in the phase BACKWARD has the ``order`` of its tensor's forward row, so the gradient that
    is computed first has the highest. Parameters and their gradients have the order of ``named_parameters()``.

    The calls of a step are a tree. A module call has a number, ``call``, counted from 0 within the step when the call
    begins; the root's call is 0. ``caller`` is the number of the enclosing call, -1 for the root. All inputs and
    outputs of a call have its number. Rows of outputs follow the rows of all calls inside.

    A tensor is measured once in a step. An output may be the next module's input, or a block may return the output of
    its last child. The second row of the tensor then has ``source`` set to the ``order`` of the first row, and
    ``statistics`` None. The gradient of the tensor belongs to the first row.
    """

    step: int
    phase: Phase
    order: int
    call: int
    """Number of the module's call in the step; -1 in rows of parameters."""
    caller: int
    module: str
    """Path of the module from the root without wrappers' prefixes; empty for the root itself. For a parameter, the path
    of the module that has the parameter."""
    occurrence: int
    """Number of the call, counted from 1 among the calls of the same module in the step; 1 for parameters."""
    kind: str
    """Kind of the tensor: ``"input"``, ``"output"``, ``"inspect"`` or ``"parameter"``."""
    slot: str
    """Position of the tensor among the tensors of its kind: ``""`` for a single tensor, ``"[0]"``, ``".logits"``,
    ``".past[1][0]"``, ``".input_ids"``; the name passed to ``inspect_activation``; the parameter's name."""
    source: int
    """Order of the row that has the statistics of the same tensor; -1 if this row has them."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"int64"``, ..."""
    partitioned: bool
    """True if the row covers only this rank's shard (ZeRO-3): sketches, sums and counts of all ranks add up."""
    statistics: Statistics | None


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
