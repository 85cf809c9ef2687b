"""Read a run into the records that the rules look at: a few numbers for each step of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ort_zero.statistics.compare.align import layout_of
from ort_zero.statistics.files import Run
from ort_zero.statistics.naming import module_name, tensor_name
from ort_zero.statistics.records import Facts, OptimizerStep, Phase, Table, decode_facts
from ort_zero.statistics.rows import FIRST
from ort_zero.utils.progress import bar

FLOATS = ("float", "bfloat")
"""Beginnings of the names of dtypes that have NaN and inf."""
IGNORED = -100
"""Label that PyTorch's and transformers' losses ignore."""
MIN_ELEMENTS = 64
"""Smallest output that counts as dead or constant, and smallest matrix whose updates count: a few values are equal, or
near zero, by chance or on purpose."""
MIN_DIMENSIONS = 2
"""Dimensions of parameters whose updates are compared with their size: vectors often begin near zero on purpose."""
LARGE = {"float16": 1e3}
"""From this magnitude an inf in a tensor of the dtype is an overflow; a mask has inf between small values."""
_LARGE = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor in a step."""

    module: str
    tensor: str
    direction: str
    """``"parameter"``, ``"input"``, ``"forward"`` or ``"backward"``."""
    value: str
    """``"nan"`` or ``"inf"``."""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What the rules see of one step of one rank. Parameters go by their full names."""

    step: int
    rank: int
    facts: Facts
    partitioned: frozenset[str]
    """Parameters of which this rank has a shard."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each parameter."""
    precise: frozenset[str]
    """Parameters of at least eight elements in float32 or float64, where an update is hardly lost in rounding."""
    origin: Place | None
    """The first value that is not finite, in the order of execution."""
    loss: float | None
    """The root's first output, if the output is one floating point number."""
    inputs: dict[str, int]
    """Fingerprint of each tensor of more than one element that enters the root."""
    outputs: int
    """Fingerprint of all tensors that leave the root."""
    ignored: tuple[str, ...]
    """Inputs of the root in which every value is :data:`IGNORED`."""
    uniform: dict[str, str]
    """Outputs whose elements are all one value: ``"zero outputs"``, where an input of the same call is not zero, or
    ``"constant outputs"``, by name."""
    gradients: dict[str, float]
    """Norm of the gradient of each parameter on this rank, before reduction; inf if it is not finite."""
    ratios: dict[str, float]
    """Norm of each parameter's change since the last recorded step over its norm, for matrices."""
    largest: float
    """Largest magnitude of all outputs."""

    @property
    def trains(self) -> bool:
        """Whether gradients were computed in the step."""
        return bool(self.gradients)

    @property
    def updates(self) -> list[OptimizerStep]:
        """The optimizer steps that followed."""
        return self.facts.updates


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the rules see of a run."""

    ranks: Sequence[Sequence[StepRecord]]
    """The records of each rank, in the order of steps."""
    data_parallel: bool
    """Whether all ranks are known to be replicas: DistributedDataParallel, or DeepSpeed without other parallelism."""
    sharded: frozenset[str]
    """Parameters of which tensor or expert parallelism gives each rank another part; others are replicas."""
    parameters_recorded: bool


def read_history(run: Run, progress: bool = False) -> History:
    """Read the steps that all ranks have."""
    ranks = []
    sharded = frozenset(run.manifest.get("sharded", ()))
    with bar(len(run.ranks) * len(run.info.steps), "reading", "step", shown=progress) as shown:
        for rank in run.ranks:
            records: list[StepRecord] = []
            previous: Table | None = None
            for table in run.tables(rank):
                if table.step in run.info.steps:
                    records.append(record_of(table, rank, previous))
                    previous = table
                    shown.update()
            ranks.append(records)
    return History(
        ranks=ranks,
        data_parallel=bool(run.manifest.get("data_parallel")) and not sharded,
        sharded=sharded,
        parameters_recorded=run.manifest["parameter_statistics"] != "off",
    )


def record_of(table: Table, rank: int, previous: Table | None) -> StepRecord:
    """Return the record of a step from its table and the table of the last recorded step."""
    parameters = np.flatnonzero(table.phase == Phase.PARAMETER).tolist()
    gradients = np.flatnonzero(table.phase == Phase.PARAMETER_GRADIENT).tolist()
    floating = np.array([dtype.startswith(FLOATS) for dtype in table.dtype], bool)
    outputs = np.array([kind == "output" for kind in table.kind], bool) & (table.source < 0) & floating
    root = np.flatnonzero((table.phase == Phase.FORWARD) & (table.call == 0)).tolist()
    measured = layout_of(table).measured.tolist()
    entering = table.batch_rows()
    leaving = [measured[row] for row in root if table.kind[row] == "output"]
    finite = np.concatenate([np.abs(table.max[outputs]), np.abs(table.min[outputs]), [0.0]])
    return StepRecord(
        step=table.step,
        rank=rank,
        facts=decode_facts(table.facts),
        partitioned=frozenset(table.full_name(row) for row in parameters if table.partitioned[row]),
        shapes={table.full_name(row): table.shape[row] for row in parameters},
        precise=frozenset(
            table.full_name(row)
            for row in parameters
            if table.elements[row] >= FIRST and table.dtype[row] in ("float32", "float64")
        ),
        origin=_origin(table, floating),
        loss=_loss(table, leaving),
        inputs={table.slot[row]: _fingerprint(table, row) for row in entering if table.elements[row] > 1},
        outputs=hash(tuple(_fingerprint(table, at) for at in leaving)),
        ignored=tuple(table.slot[row] for row in entering if table.min[row] == table.max[row] == IGNORED),
        uniform=_uniform(table, np.flatnonzero(outputs & (table.phase == Phase.FORWARD)), measured),
        gradients={
            table.full_name(row): np.inf if table.nan[row] or table.inf[row] else float(table.l2[row])
            for row in gradients
        },
        ratios=_ratios(previous, table, parameters) if previous is not None else {},
        largest=float(np.nanmax(finite)),
    )


def _fingerprint(table: Table, row: int) -> int:
    return xxhash.xxh3_64_intdigest(table.raw(np.array([row])).tobytes() + repr(table.shape[row]).encode())


def _loss(table: Table, leaving: list[int]) -> float | None:
    first = next(iter(leaving), None)
    if first is None or table.elements[first] != 1 or not table.dtype[first].startswith(FLOATS):
        return None
    return float(table.first[first, 0])


def _uniform(table: Table, rows: np.ndarray, measured: list[int]) -> dict[str, str]:
    """Return the outputs that are zero though an input is not, and those with one other value.

    Outputs without a gradient are left out: a position bias of zeros is no computed value.
    """
    rows = rows[np.isin(table.order[rows], table.order[table.phase == Phase.BACKWARD])]
    found = {}
    for row in rows[(table.elements[rows] >= MIN_ELEMENTS) & (table.min[rows] == table.max[rows])].tolist():
        of_call = np.flatnonzero((table.phase == Phase.FORWARD) & (table.call == table.call[row])).tolist()
        takes_values = any(table.kind[at] == "input" and table.l2[measured[at]] > 0 for at in of_call)
        if table.max[row] != 0 or takes_values:
            name = module_name(table.module[row], int(table.occurrence[row]))
            kind = "constant outputs" if table.max[row] != 0 else "zero outputs"
            found[f"{name} {tensor_name('output', table.slot[row])}"] = kind
    return found


def _ratios(previous: Table, table: Table, parameters: list[int]) -> dict[str, float]:
    before = {
        (previous.module[row], previous.slot[row]): row
        for row in np.flatnonzero(previous.phase == Phase.PARAMETER).tolist()
    }
    ratios = {}
    for row in parameters:
        at = before.get((table.module[row], table.slot[row]))
        is_matrix = len(table.shape[row]) >= MIN_DIMENSIONS and table.elements[row] >= MIN_ELEMENTS
        if at is None or not is_matrix or previous.elements[at] != table.elements[row]:
            continue
        size = float(previous.l2[at])
        if size > 0:
            ratios[table.full_name(row)] = float(np.linalg.norm(table.sketch[row] - previous.sketch[at])) / size
    return ratios


def _origin(table: Table, floating: np.ndarray) -> Place | None:
    """Return the first value of a step that is not finite: a parameter, a value of the forward, or a gradient.

    A mask of -inf is no such value. Gradients are computed from the last tensor to the first.
    """
    wrong = floating & (table.source < 0) & ((table.nan > 0) | (table.inf > 0))
    if not wrong.any():
        return None
    rows = np.flatnonzero(wrong & (table.phase == Phase.PARAMETER)).tolist()
    rows += [row for row in np.flatnonzero(wrong & (table.phase == Phase.FORWARD)).tolist() if _arises(table, row)]
    if not rows:
        backward = np.flatnonzero(wrong & (table.phase == Phase.BACKWARD))
        rows = backward[np.argsort(-table.order[backward], kind="stable")].tolist()
        rows += np.flatnonzero(wrong & (table.phase == Phase.PARAMETER_GRADIENT)).tolist()
    return _place(table, rows[0]) if rows else None


def _arises(table: Table, row: int) -> bool:
    """Return True for a value with NaN, or with inf that is an overflow."""
    if table.nan[row]:
        return True
    finite = max(abs(float(table.min[row])), abs(float(table.max[row])))
    alone = not np.isfinite(finite)
    entering = table.kind[row] == "input" and table.caller[row] < 0
    return (alone and (table.kind[row] == "output" or entering)) or finite >= LARGE.get(table.dtype[row], _LARGE)


def _place(table: Table, row: int) -> Place:
    phase, kind = Phase(int(table.phase[row])), table.kind[row]
    module, tensor = module_name(table.module[row], int(table.occurrence[row])), tensor_name(kind, table.slot[row])
    direction = {Phase.PARAMETER: "parameter", Phase.FORWARD: "forward"}.get(phase, "backward")
    if kind == "parameter":
        module = table.full_name(row)
    if phase == Phase.FORWARD and kind == "input":
        # an input that no module has put out: the batch, or the code of the module around
        direction = "input" if table.caller[row] < 0 else direction
        caller = np.flatnonzero((table.phase == Phase.FORWARD) & (table.call == table.caller[row]))
        if caller.size:
            module = module_name(table.module[caller[0]], int(table.occurrence[caller[0]]))
            tensor = f"what it passes to {table.module[row]}"
    value = "nan" if table.nan[row] else "inf"
    return Place(module=module, tensor=tensor, direction=direction, value=value, dtype=table.dtype[row])
