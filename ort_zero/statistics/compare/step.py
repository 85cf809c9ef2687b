"""Compare the values of one step of one rank in two runs: how far the tensors of each pair are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import Pairs
from ort_zero.statistics.compare.comparison import ComparedRecord
from ort_zero.statistics.naming import tensor_name
from ort_zero.statistics.records import Phase, Table
from ort_zero.statistics.rows import COLUMNS

NO_NUMBER = 4.0
"""The error of a pair without a number, such as NaN in one run alone; larger than all errors (at most 2)."""
SAME, SHAPE, NAN, NUMERIC = range(4)
KIND_NAMES = ("", "shape", "nan", "numeric")


@dataclass(eq=False)
class StepComparison:
    """One step of one rank in two runs. Arrays have a number for each pair; the stages of a comparison set them.

    The tables have the layouts of `pairs`, but may belong to a later step than the tables in `pairs`.
    """

    rank: int
    pairs: Pairs
    a: Table
    b: Table
    error: np.ndarray = field(init=False)
    """l2 norm of the difference relative to the larger norm, estimated from the sketches, and at least
    :attr:`norm_error`; :data:`NO_NUMBER` if the shapes differ or one has NaN."""
    norm_error: np.ndarray = field(init=False)
    """Difference of the norms, relative to the larger norm."""
    difference: np.ndarray = field(init=False)
    """Kind of the difference, ``SHAPE``, ``NAN`` or ``NUMERIC``; ``SAME`` for pairs that are not compared."""
    other_dtype: np.ndarray = field(init=False)
    """True where the dtypes differ."""
    other_sample: np.ndarray = field(init=False)
    """True where the two runs sampled different elements of a tensor, which cannot be compared."""
    parameter_error: float = field(init=False)
    """Relative error of all parameters together at the beginning of the step."""
    unseen: np.ndarray = field(init=False)
    """For each parameter, the estimated norm of the difference outside of the samples."""
    inherited: np.ndarray = field(init=False)
    """The largest error among the inputs of each pair's computation."""
    tolerance_for: Callable[[np.ndarray], np.ndarray] = field(init=False)
    """Returns the largest errors that rounding and inherited errors explain."""
    tolerance: np.ndarray = field(init=False)
    norm_tolerance: np.ndarray = field(init=False)
    """The largest difference of norms of each pair that rounding and the inherited error explain."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.a.step

    @property
    def is_first(self) -> bool:
        """True if no optimizer step has changed the parameters yet."""
        return self.step == 0

    def parameters(self) -> np.ndarray:
        """Return the numbers of the pairs that are parameters."""
        return np.flatnonzero(self.pairs.phase == Phase.PARAMETER)

    def parameter_sketches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sketches of the parameters in both runs, float64 [parameters, SKETCH]."""
        rows = self.parameters()
        return self.a.sketch[self.pairs.a.measured[rows]], self.b.sketch[self.pairs.b.measured[rows]]

    def unsampled(self) -> np.ndarray:
        """Return for each pair the expected ratio of the whole tensor's norm to the norm of the measured sample."""
        covered = self.a.elements[self.pairs.a.measured]
        shapes = [self.a.shape[row] for row in self.pairs.a.rows.tolist()]
        whole = np.fromiter((math.prod(shape) for shape in shapes), float, len(shapes))
        return np.sqrt(np.maximum(np.divide(whole, covered, out=np.ones(len(whole)), where=covered > 0), 1.0))

    def measure(self) -> None:
        """Set the distances of all pairs."""
        pairs, a, b = self.pairs, self.a, self.b
        rows_a, rows_b = pairs.a.measured, pairs.b.measured
        norms = _of_larger_norm(abs(a.l2[rows_a] - b.l2[rows_b]), a, b, rows_a, rows_b)
        error = np.maximum(sketch_errors(a, b, rows_a, rows_b), norms)
        shape = _unequal(a.shape, b.shape, rows_a, rows_b)
        not_finite = (a.nan[rows_a] != b.nan[rows_b]) | (a.inf[rows_a] != b.inf[rows_b]) | ~np.isfinite(error)
        sampled = (a.elements[rows_a] != b.elements[rows_b]) & ~shape
        kind = np.select([~pairs.comparable | sampled, shape, not_finite], [SAME, SHAPE, NAN], NUMERIC)
        self.error = np.select([kind == SAME, kind == NUMERIC], [0.0, np.minimum(error, NO_NUMBER)], NO_NUMBER)
        self.norm_error = np.where(kind == NUMERIC, norms, 0.0)
        self.difference = kind
        self.other_dtype = _unequal(a.dtype, b.dtype, rows_a, rows_b) & pairs.comparable
        self.other_sample = sampled & pairs.comparable

    def with_tolerance(self, pairs: Any, tolerance: Any) -> StepComparison:
        """Return a copy in which `pairs`, an index of an array, have another tolerance."""
        changed = copy.copy(self)
        changed.tolerance = self.tolerance.copy()
        changed.tolerance[pairs] = tolerance
        return changed

    def without_sketches(self) -> StepComparison:
        """Return a copy without sketches, which take most of the memory."""
        changed, empty = copy.copy(self), np.zeros((0, 0))
        changed.a, changed.b = (replace(table, sketch=empty) for table in (self.a, self.b))
        return changed

    def record(self, number: int) -> ComparedRecord:
        """Return a pair as a record."""
        pairs, table = self.pairs, self.a
        row = int(pairs.a.rows[number])
        error, tolerance = float(self.error[number]), float(self.tolerance[number])
        return ComparedRecord(
            step=self.step,
            rank=self.rank,
            phase=Phase(int(table.phase[row])),
            order=int(table.order[row]),
            module=table.module[row],
            occurrence=int(table.occurrence[row]),
            tensor=tensor_name(table.kind[row], table.slot[row]),
            kind=KIND_NAMES[self.difference[number]] if error > tolerance else "",
            error=float("nan") if error >= NO_NUMBER else error,
            tolerance=tolerance,
            inherited=float(self.inherited[number]),
            a=_side(table, row, int(pairs.a.measured[number])),
            b=_side(self.b, int(pairs.b.rows[number]), int(pairs.b.measured[number])),
        )


def _side(table: Table, key: int, row: int) -> dict[str, Any]:
    """Return shape, dtype, statistics and first values of a record, whose statistics are in the row `row`."""
    numbers = {name: getattr(table, name)[row].item() for name in COLUMNS}
    first = table.first[row, : numbers["elements"]].tolist()
    return {"shape": list(table.shape[key]), "dtype": table.dtype[key], **numbers, "first": first}


class StepRecords(Sequence):
    """The compared records of one step and rank, in order of execution, made on demand: only a report needs them."""

    def __init__(self, step: StepComparison):
        self._step, self._numbers = step, np.flatnonzero(step.pairs.comparable)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._step.record(int(self._numbers[index]))


def sketch_errors(a: Table, b: Table, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    """Return the estimated l2 norm of the difference of each pair of rows, relative to the larger norm, or 0."""
    gap = a.sketch[rows_a] - b.sketch[rows_b]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.sqrt(np.einsum("ij,ij->i", gap, gap))
    return _of_larger_norm(difference, a, b, rows_a, rows_b)


def _of_larger_norm(difference: np.ndarray, a: Table, b: Table, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    norm = np.maximum(a.l2[rows_a], b.l2[rows_b])
    with np.errstate(invalid="ignore", over="ignore"):
        return np.divide(difference, norm, out=np.zeros(len(norm)), where=norm > 0)


def _unequal(a: Sequence, b: Sequence, rows_a: np.ndarray, rows_b: np.ndarray) -> np.ndarray:
    """Return True for each pair of rows where two lists differ."""
    return np.fromiter((a[i] != b[j] for i, j in zip(rows_a.tolist(), rows_b.tolist())), bool, len(rows_a))
