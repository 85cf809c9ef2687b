"""Define the records of a run: the table of one step, what a step keeps beside it, and the description of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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
    """What the step keeps beside its tensors, see :class:`Facts`."""

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
class OptimizerStep:
    """One step of one optimizer, as its arguments were before the update."""

    optimizer: int
    """Number of the optimizer in its process, in the order of first steps."""
    rates: list[float]
    """Learning rate of each group."""
    gradients: dict[str, float | None]
    """Norm of the gradient of each parameter that model and optimizer share, after reduction, unscaling and clipping;
    None for a parameter without a gradient. NaN and inf stay."""
    resting: list[str]
    """Parameters among them that may stay as they are, as the learning rate of their group is 0, or too small."""
    stale: list[str]
    """Parameters whose gradient still contains that of an earlier step of this optimizer: nobody set it to zero."""
    foreign_norm: float | None
    """Norm of all gradients of tensors that the model does not have, such as ZeRO's flat ones; None without any."""
    foreign_idle: list[list[int]]
    """Shapes of the tensors that the model does not have and that have no gradient."""

    def has_gradient(self) -> bool:
        """Return True if any tensor of the optimizer has a gradient."""
        return self.foreign_norm is not None or any(norm is not None for norm in self.gradients.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a step keeps beside its tensors."""

    training: bool = True
    """Mode of the root module."""
    gradients: bool = True
    """Whether autograd recorded the forward."""
    other_mode: list[str] = field(default_factory=list)
    """Paths of dropout and batch normalization whose mode differs from the root's."""
    moded: bool = False
    """Whether the model has dropout or batch normalization at all."""
    unfitted: list[str] = field(default_factory=list)
    """Paths of modules that evaluate with statistics that no training forward has computed yet."""
    tied: list[list[str]] = field(default_factory=list)
    """Names of parameters that are one tensor, by tensor."""
    untied: list[str] = field(default_factory=list)
    """Names of the input and the output embedding, if they are two tensors where the configuration ties them."""
    frozen: list[str] = field(default_factory=list)
    """Names of the parameters that require no gradient."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Digest of this rank's part of each parameter; of a frozen one, of a sample."""
    random: dict[str, str] = field(default_factory=dict)
    """Digests of the states of random number generators."""
    drawn: dict[str, str] = field(default_factory=dict)
    """The function that draws random numbers in an evaluation, by the path of the module that calls it."""
    workers: int = 0
    """Number of workers of the data loader that yielded a batch since the last step; 0 unless it was one batch."""
    updates: list[OptimizerStep] = field(default_factory=list)
    """The optimizer steps between this step and the next."""
    lines: list[str] = field(default_factory=list)
    """The user's lines of the calls, by number, where operators are recorded: ``"model.py:41 in forward"``."""


def encode_facts(facts: Facts) -> str:
    """Return facts as JSON."""
    return json.dumps(asdict(facts), separators=(",", ":"))


def decode_facts(text: str) -> Facts:
    """Return the facts in JSON; those by default of an empty text."""
    content = json.loads(text or "{}")
    return Facts(**{**content, "updates": [OptimizerStep(**each) for each in content.get("updates", [])]})


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
