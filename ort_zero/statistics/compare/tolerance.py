"""Compute the tolerance of a record: the largest error that rounding and the errors of its inputs explain.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 1.5, 3.3) bounds the
relative error of a computed value: `tolerance = (floor + amplification * inherited) * condition`. `floor` is the
rounding error of the computation, `inherited` the largest error of its inputs, `condition` magnifies both.

The constants are calibrated on pairs of correct runs over several steps of Adam: BERT, GPT-2 and a convolutional net
whose operators sum in another order or in float64. There, the error of a record without inherited error was at most
6 float32 epsilons. Other errors were at most 3.2 (forward), 2.6 (backward) and 5.7 (gradients of parameters) times the
inherited error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.records import Phase

EPSILON = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
}
FLOOR = 16.0
"""Rounding error of one operator, in epsilons: sums in another order, other approximations of exp and erf."""
HALF_FLOOR = 2.0
"""Rounding error of one operator in half precision, in epsilons; sums are accumulated in float32."""
_SINGLE_PARAMETERS = 3
"""Maximum number of parameters of a module that runs a single operator."""
NORM_FLOOR = 8.0
"""Rounding error of a norm, in epsilons."""
NORM_INHERITED = 2.0
JUMP = 16.0
"""Share of elements whose derivative jumps, such as ReLU's at 0, divided by the inherited error."""
REFERENCE = 4.0
"""Factor by which an error may exceed the error between a run and its repetition, the reference."""


def epsilons(dtypes: list[str]) -> np.ndarray:
    """Return the distance from 1 to the next number in each dtype; 0 for integers and booleans."""
    return np.array([EPSILON.get(dtype, 0.0) for dtype in dtypes])


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """The properties of the pairs of a structure that limit their errors independent of their values."""

    epsilon: np.ndarray
    """Epsilon of the coarsest dtype among each value and the inputs of its computation."""
    exact: np.ndarray
    """True for integers and booleans."""
    compound: np.ndarray
    """True for each frame that runs several operators."""


def limits_of(dataflow: Dataflow, other_dtype: bool) -> Limits:
    """Compute the limits of a structure.

    Args:
        dataflow: the inputs of each value.
        other_dtype: the runs differ in dtype on purpose: the coarser dtype of a pair sets its epsilon. Otherwise the
            finer dtype does, and a coarser tensor in one run alone is a difference.
    """
    pairs = dataflow.pairs
    a = epsilons(pairs.a.table.dtype)[pairs.row_a]
    b = epsilons(pairs.b.table.dtype)[pairs.row_b]
    both = np.maximum(a, b) if other_dtype else np.minimum(a, b)
    of_frames = dataflow.readable.largest_of_frames(dataflow.frames, both)
    epsilon = both.copy()
    inner = dataflow.inner()
    epsilon[inner] = np.maximum(both[inner], of_frames[dataflow.frame[inner]])
    values, gradients = dataflow.with_gradient()
    epsilon[gradients] = np.maximum(both[gradients], dataflow.largest_around(of_frames)[values])
    owners = dataflow.owners_of_gradients()
    np.maximum.at(epsilon, owners.pair, of_frames[owners.frame])
    exact = (a == 0) & (b == 0)
    return Limits(epsilon=epsilon, exact=exact, compound=_compound(dataflow))


def _compound(dataflow: Dataflow) -> np.ndarray:
    """Return True for frames that call children, or have more parameters than one operator."""
    table = dataflow.pairs.a.table
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    calls = {int(call) for call in table.caller[rows] if call >= 0}
    compound = np.zeros(dataflow.frames, bool)
    compound[[dataflow.frame_of_call[call] for call in calls if call in dataflow.frame_of_call]] = True
    at = dataflow.pairs.phase[dataflow.owners.pair] == Phase.PARAMETER
    compound |= np.bincount(dataflow.owners.frame[at], minlength=dataflow.frames) > _SINGLE_PARAMETERS
    return compound


def floor_of(limits: Limits) -> np.ndarray:
    """Return the rounding error of each pair without inherited errors."""
    return limits.epsilon * np.where(limits.epsilon > EPSILON["float32"], HALF_FLOOR, FLOOR)


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """The growth of rounding errors and inherited errors in each pair; see :mod:`.conditions`."""

    exact: np.ndarray
    condition: np.ndarray
    amplification: np.ndarray
    systematic: np.ndarray
    """True for values that one operator computed from equal parameters, see :meth:`norm_tolerance`."""
    epsilon: np.ndarray
    jumps: np.ndarray
    """True for gradients that may jump when an input changes slightly: of ReLU at 0, of a maximum in a pool."""

    def tolerance(self, floor: np.ndarray, inherited: np.ndarray) -> np.ndarray:
        """Return the largest error of each pair that `inherited` explains."""
        inexact = (floor + self.amplification * inherited) * self.condition
        inexact = inexact + np.where(self.jumps, np.sqrt(JUMP * inherited), 0.0)
        # if a fraction x of the elements of an exact tensor changes, the relative error is sqrt(x)
        return np.where(self.exact, np.sqrt(self.amplification * inherited), inexact)

    def norm_tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return the largest difference of norms that `inherited` explains, inf for pairs whose norms are not checked.

        Rounding errors have both signs and hardly change a norm: in correct runs, norms differed by at most a third of
        a dtype's epsilon. A different ``eps`` of a normalization scales all elements in the same direction.
        """
        limit = (NORM_FLOOR * self.epsilon + NORM_INHERITED * inherited) * self.condition
        return np.where(self.systematic, limit, np.inf)
