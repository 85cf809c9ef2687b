"""How large the error of a record may be without a reason of its own.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 1.5, 3.3): the relative
error of a computed value is at most its own rounding errors plus what it inherits, both magnified by the condition of
what is computed. `tolerance = (floor + amplification * inherited) * condition`. The constants are calibrated on clean
pairs of runs: BERT, GPT-2 and a convolutional net whose operators sum in another order or in float64, over several
steps of Adam. There the error of a record was at most 6 float32 epsilons where nothing was inherited, and at most
3.2 (forward), 2.6 (backward) and 5.7 (gradients of parameters) times what was inherited.
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
"""Rounding error of one operator in epsilons: sums in another order, other approximations of exp and erf."""
HALF_FLOOR = 2.0
"""Rounding error of one operator in epsilons of half precision, whose sums are accumulated in float32."""
_SINGLE_PARAMETERS = 3
"""Maximum number of parameters of its own of a module that is a single operator."""
NORM_FLOOR = 8.0
"""Rounding error of a norm in epsilons."""
NORM_INHERITED = 2.0
JUMP = 16.0
"""Ratio of the share of elements that cross a border where a derivative jumps to the inherited error."""
REFERENCE = 4.0
"""Factor by which an error may exceed the spread between two runs of the reference."""


def epsilons(dtypes: list[str]) -> np.ndarray:
    """Return the distance from 1 to the next number of each dtype; 0 for dtypes that are exact."""
    return np.array([EPSILON.get(dtype, 0.0) for dtype in dtypes])


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Properties of the pairs of a structure that limit their errors, whatever their values."""

    epsilon: np.ndarray
    """Epsilon of the coarsest dtype among each value and what it was computed from."""
    exact: np.ndarray
    """True for integers and booleans."""
    compound: np.ndarray
    """For each frame: True if several operators run in it."""


def limits_of(dataflow: Dataflow, other_dtype: bool) -> Limits:
    """Return the limits of a structure.

    Args:
        dataflow: what was computed from what.
        other_dtype: the runs differ in dtype on purpose: the coarser one counts. Otherwise a coarser value in one run
            alone is a difference.
    """
    pairs = dataflow.pairs
    a = epsilons(pairs.a.table.dtype)[pairs.row_a]
    b = epsilons(pairs.b.table.dtype)[pairs.row_b]
    both = np.maximum(a, b) if other_dtype else np.minimum(a, b)
    of_frames = np.zeros(dataflow.frames)
    np.maximum.at(of_frames, dataflow.known.frame, both[dataflow.known.pair])
    epsilon = both.copy()
    inner = dataflow.forward[dataflow.frame[dataflow.forward] >= 0]
    epsilon[inner] = np.maximum(both[inner], of_frames[dataflow.frame[inner]])
    with_gradient = dataflow.forward[pairs.gradient[dataflow.forward] >= 0]
    gradients = pairs.gradient[with_gradient]
    epsilon[gradients] = np.maximum(both[gradients], dataflow.largest_around(of_frames)[with_gradient])
    owners = dataflow.owners_of_gradients()
    np.maximum.at(epsilon, owners.pair, of_frames[owners.frame])
    exact = (a == 0) & (b == 0)
    return Limits(epsilon=epsilon, exact=exact, compound=_compound(dataflow))


def _compound(dataflow: Dataflow) -> np.ndarray:
    """Return True for frames that have children, or work with more parameters than one operator has."""
    table = dataflow.pairs.a.table
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    calls = {int(call) for call in table.caller[rows] if call >= 0}
    found = np.zeros(dataflow.frames, bool)
    found[[dataflow.frame_of_call[call] for call in calls if call in dataflow.frame_of_call]] = True
    at = dataflow.pairs.phase[dataflow.owners.pair] == Phase.PARAMETER
    found |= np.bincount(dataflow.owners.frame[at], minlength=dataflow.frames) > _SINGLE_PARAMETERS
    return found


def floor_of(limits: Limits) -> np.ndarray:
    """Return the error that a value of its own rounding errors has."""
    return limits.epsilon * np.where(limits.epsilon > EPSILON["float32"], HALF_FLOOR, FLOOR)


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """How rounding errors and inherited errors grow in each pair; see :mod:`.conditions`."""

    exact: np.ndarray
    condition: np.ndarray
    amplification: np.ndarray
    systematic: np.ndarray
    """True for values of one operator on parameters that do not differ: see :meth:`norm_tolerance`."""
    epsilon: np.ndarray
    jumps: np.ndarray
    """True for gradients that may jump where an input crosses a border: of ReLU, of the largest in a pool."""

    def tolerance(self, floor: np.ndarray, inherited: np.ndarray) -> np.ndarray:
        """Return the largest error of each pair that `inherited` explains."""
        inexact = (floor + self.amplification * inherited) * self.condition
        inexact = inexact + np.where(self.jumps, np.sqrt(JUMP * inherited), 0.0)
        # a fraction x of elements that flip is a relative error of sqrt(x)
        return np.where(self.exact, np.sqrt(self.amplification * inherited), inexact)

    def norm_tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return how far the norms of each pair may be apart, inf where only the error counts.

        Rounding errors are about as often up as down, and leave a norm alone: in clean pairs norms differed by at most
        a third of an epsilon. Another epsilon in a normalization moves all elements the same way.
        """
        limit = (NORM_FLOOR * self.epsilon + NORM_INHERITED * inherited) * self.condition
        return np.where(self.systematic, limit, np.inf)
