"""Define what a run's statistics are: the phases of a step, the table of one step, and the description of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ort_zero.statistics.rows import COLUMNS, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH


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


@dataclass(slots=True, eq=False)
class Table:
    """One step of one rank: columns of one length, in the file's order. The arrays are read-only; tables share lists.

    The calls of a step are a tree. All inputs and outputs of a call have its number. Rows of outputs follow the rows of
    all calls inside.

    A tensor is measured once in a step. An output may be the next module's input, or a block may return the output of
    its last child. The second row of the tensor then has a ``source``, and no valid statistics. The gradient of the
    tensor belongs to the first row.
    """

    step: int
    phase: np.ndarray
    """See :class:`~.records.Phase`."""
    order: np.ndarray
    """Numbers the rows of a phase as the module code reaches the tensors: 0, 1, 2, ... in the phase FORWARD. A gradient
    in the phase BACKWARD has the order of its tensor's forward row, so the gradient that is computed first has the
    highest. Parameters and their gradients have the order of ``named_parameters()``."""
    call: np.ndarray
    """Number of the module's call, counted from 0 within the step when the call begins; -1 in rows of parameters."""
    caller: np.ndarray
    """Number of the enclosing call, -1 for the root."""
    occurrence: np.ndarray
    """Number of the call, counted from 1 among the calls of the same module in the step; 1 for parameters."""
    source: np.ndarray
    """Order of the row that has the statistics of the same tensor; -1 if this row has them."""
    module: list[str]
    """Path of the module from the root without wrappers' prefixes; empty for the root itself. For a parameter, the path
    of the module that has the parameter."""
    kind: list[str]
    """``"input"``, ``"output"``, ``"inspect"`` or ``"parameter"``."""
    slot: list[str]
    """Position of the tensor among the tensors of its kind: ``""`` for a single tensor, ``"[0]"``, ``".logits"``,
    ``".past[1][0]"``, ``".input_ids"``; the name passed to ``inspect_activation``; the parameter's name."""
    dtype: list[str]
    """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"int64"``, ..."""
    shape: list[tuple[int, ...]]
    partitioned: np.ndarray
    """True if the row covers only this rank's shard (ZeRO-3): sketches, sums and counts of all ranks add up."""
    elements: np.ndarray
    """This column and the following ones: see :mod:`.rows`."""
    min: np.ndarray
    max: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    abs_mean: np.ndarray
    l2: np.ndarray
    negative: np.ndarray
    positive: np.ndarray
    zero: np.ndarray
    nan: np.ndarray
    inf: np.ndarray
    first: np.ndarray
    sketch: np.ndarray
    facts: str = ""
    """What the step keeps beside its tensors, see :mod:`.facts`."""

    def __len__(self) -> int:
        return len(self.module)

    def full_name(self, row: int) -> str:
        """Return the name of a parameter, from the path of its module and its own name."""
        return ".".join(filter(None, (self.module[row], self.slot[row])))

    def batch_rows(self) -> list[int]:
        """Return the numbers of the rows of tensors that enter the model."""
        entering = (self.phase == Phase.FORWARD) & (self.call == 0) & (self.source < 0)
        return [row for row in np.flatnonzero(entering).tolist() if self.kind[row] == "input"]

    def raw(self, at: np.ndarray) -> np.ndarray:
        """Return the statistics of the rows with the numbers `at`, float64 [len(at), :data:`~.rows.WIDTH`]."""
        raw = np.empty((len(at), WIDTH))
        for number, name in enumerate(COLUMNS):
            raw[:, number] = getattr(self, name)[at]
        raw[:, FIRST_COLUMNS], raw[:, SKETCH_COLUMNS] = self.first[at], self.sketch[at]
        return raw


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
