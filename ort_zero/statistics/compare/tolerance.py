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

from ort_zero.statistics.compare.align import INPUT
from ort_zero.statistics.compare.dataflow import Lineage, gradient_of_frames
from ort_zero.statistics.compare.distance import unsampled
from ort_zero.statistics.file_format import Table
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
"""Epsilons that one operator may be off: sums in another order, other approximations of exp and erf."""
HALF_FLOOR = 2.0
"""The same for half precision, whose sums are accumulated in float32."""
LEAF = 12.0
"""Amplification by a module without children: one operator."""
COMPOUND = 64.0
"""Amplification by code between children: several operators, among them softmax of large scores."""
LATER = 8.0
"""Times the limit once parameters were trained apart: what is wrong from the start was found there, and values that
vanish, as behind many normalizations, amplify what the parameters brought."""
BACKWARD = 16.0
PARAMETER_GRADIENT = 8.0
_SINGLE_PARAMETERS = 3
"""A module with more parameters of its own than these is no single operator."""
_LARGE_INPUT = 8.0
"""exp and the like amplify relative errors by their input's size; smaller inputs are covered by :data:`LEAF`."""
_LARGEST_NORM = 1e30
"""What is larger is no value that is computed with: the smallest number of a dtype as a mask."""
NORM_FLOOR = 8.0
"""Epsilons by which norms may differ."""
NORM_INHERITED = 2.0
_LARGEST_OFFSET = 1e3
CANCELLATION = 8.0
"""A linear layer with small weights makes values so many times smaller without any cancellation."""
JUMP = 16.0
"""Times the inherited error is the share of elements that cross a border where a derivative jumps."""
_SOME_ZEROS = 0.005
"""Share of zeros in a gradient that tells of ReLU or of a maximum."""
REFERENCE = 4.0
"""Times the spread between two runs of the reference."""


def epsilons(dtypes: list[str]) -> np.ndarray:
    """Return the distance from 1 to the next number of each dtype; 0 for dtypes that are exact."""
    return np.array([EPSILON.get(dtype, 0.0) for dtype in dtypes])


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What may be expected of the pairs of a structure, whatever their values."""

    epsilon: np.ndarray
    """Of the coarsest dtype among a value and what it was computed from."""
    exact: np.ndarray
    """True for integers and booleans."""
    compound: np.ndarray
    """For each frame: True if several operators run in it."""


def limits_of(lineage: Lineage, other_dtype: bool) -> Limits:
    """Return the limits of a structure.

    Args:
        lineage: who inherits from whom.
        other_dtype: the runs differ in dtype on purpose: the coarser one counts. Otherwise a coarser value in one run
            alone is a difference.
    """
    pairs = lineage.pairs
    a = epsilons(pairs.a.table.dtype)[pairs.row_a]
    b = epsilons(pairs.b.table.dtype)[pairs.row_b]
    both = np.maximum(a, b) if other_dtype else np.minimum(a, b)
    of_frame = np.zeros(lineage.frames)
    np.maximum.at(of_frame, lineage.seen.frame, both[lineage.seen.pair])
    epsilon = both.copy()
    inner = lineage.forward[lineage.frame[lineage.forward] >= 0]
    epsilon[inner] = np.maximum(both[inner], of_frame[lineage.frame[inner]])
    used = largest_around(lineage, of_frame)
    with_gradient = lineage.forward[pairs.gradient[lineage.forward] >= 0]
    places = pairs.gradient[with_gradient]
    epsilon[places] = np.maximum(both[places], used[with_gradient])
    at = pairs.phase[lineage.owned] == Phase.PARAMETER_GRADIENT
    np.maximum.at(epsilon, lineage.owned[at], of_frame[lineage.owner[at]])
    exact = (a == 0) & (b == 0)
    return Limits(epsilon=epsilon, exact=exact, compound=_compound(lineage))


def largest_around(lineage: Lineage, of_frame: np.ndarray) -> np.ndarray:
    """Return for each pair the largest number among those of the frames in which it is there to be used."""
    found = np.zeros(len(lineage.pairs))
    np.maximum.at(found, lineage.used_pair, of_frame[lineage.used_frame])
    np.maximum.at(found, lineage.passed, of_frame[lineage.frame[lineage.passed]])
    return found


def _compound(lineage: Lineage) -> np.ndarray:
    """Return True for frames that have children, or work with more parameters than one operator has."""
    table = lineage.pairs.a.table
    rows = np.flatnonzero(table.phase == Phase.FORWARD)
    calls = {int(call) for call in table.caller[rows] if call >= 0}
    found = np.zeros(lineage.frames, bool)
    found[[lineage.frame_of_call[call] for call in calls if call in lineage.frame_of_call]] = True
    at = lineage.pairs.phase[lineage.owned] == Phase.PARAMETER
    found |= np.bincount(lineage.owner[at], minlength=lineage.frames) > _SINGLE_PARAMETERS
    return found


def floor_of(limits: Limits) -> np.ndarray:
    """Return the error that a value of its own rounding errors has."""
    return limits.epsilon * np.where(limits.epsilon > EPSILON["float32"], HALF_FLOOR, FLOOR)


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """How rounding errors and inherited errors grow in each pair."""

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
        """Return how far the norms of each pair may be apart, inf where no more is asked than of the error.

        Rounding errors are about as often up as down, and leave a norm alone: in clean pairs norms differed by at most
        a third of an epsilon. Another epsilon in a normalization moves all elements the same way.
        """
        limit = (NORM_FLOOR * self.epsilon + NORM_INHERITED * inherited) * self.condition
        return np.where(self.systematic, limit, np.inf)


def conditions_of(lineage: Lineage, limits: Limits, a: Table, b: Table, drifted: bool) -> Conditions:
    """Return how errors grow, from the sizes of the values of a step.

    Args:
        lineage: who inherits from whom.
        limits: what may be expected of the structure.
        a: numbers of the first run.
        b: numbers of the second run.
        drifted: the parameters differ. Their errors have a pattern, which shows where results are small; rounding
            errors are random and show only where much larger values cancel.
    """
    pairs, frames = lineage.pairs, lineage.frames
    rows_a, rows_b = pairs.measured_a, pairs.measured_b
    scale = unsampled(pairs, a)
    # errors are relative to the larger norm: nothing in place of something is no rounding error
    norm = larger = np.maximum(a.l2[rows_a], b.l2[rows_b]) * scale
    elements = np.maximum(a.elements[rows_a], 1) * scale**2
    usable = ~limits.exact & (larger < _LARGEST_NORM)
    # values that are 0 or negative are a mask: it is added, but its size has no meaning
    usable &= ~((a.max[rows_a] <= 0) & (a.zero[rows_a] > 0) & (pairs.phase == Phase.FORWARD))
    root = np.sqrt(elements)
    size = np.where(usable, larger / root, 0.0)

    condition, amplification = np.ones(len(pairs)), np.full(len(pairs), LEAF)
    forward = lineage.forward[lineage.frame[lineage.forward] >= 0]
    frame = lineage.frame[forward]
    around = np.zeros(frames)
    np.maximum.at(around, lineage.seen.frame, size[pairs.reference][lineage.seen.pair])
    ratio = _ratio(around[frame], norm[forward] / root[forward])
    condition[forward] = ratio if drifted else np.maximum(ratio / CANCELLATION, 1.0)
    condition[forward] *= np.where(limits.compound, 1.0, _offsets(lineage, usable, a))[frame]
    extent = np.maximum(np.abs(a.min[rows_a]), np.abs(a.max[rows_a]))
    extent = np.where(usable & np.isfinite(extent), extent, 0.0)
    largest_input = np.zeros(frames)
    taken = lineage.forward[pairs.a.kind[pairs.row_a[lineage.forward]] == INPUT]
    inside = np.array([lineage.frame_of_call[call] for call in pairs.a.table.call[pairs.row_a[taken]].tolist()], int)
    np.maximum.at(largest_input, inside, extent[pairs.reference][taken])
    bare = np.ones(frames, bool)
    bare[lineage.owner] = False
    leaf = LEAF * np.where(bare, np.clip(largest_input / _LARGE_INPUT, 1.0, COMPOUND / LEAF), 1.0)
    inner = np.zeros(frames)
    np.maximum.at(inner, lineage.seen.frame, extent[pairs.reference][lineage.seen.pair])
    compound = LEAF * np.clip(inner**2, 1.0, COMPOUND / LEAF)
    amplification[forward] = np.where(limits.compound, compound, leaf)[frame]

    gradients = pairs.gradient[lineage.forward]
    has = lineage.forward[gradients >= 0]
    of_gradient, places = np.zeros(len(pairs)), pairs.gradient[has]
    of_gradient[has] = larger[places]
    incoming = gradient_of_frames(lineage, of_gradient)
    reaching = largest_around(lineage, incoming)
    condition[places] = _ratio(reaching[has], norm[places])
    amplification[places] = BACKWARD
    _returned_conditions(lineage, norm, elements, condition, amplification)
    jumps = np.zeros(len(pairs), bool)
    zeros = np.minimum(a.zero[rows_a], b.zero[rows_b]) / np.maximum(a.elements[rows_a], 1)
    single = largest_around(lineage, (bare & ~limits.compound).astype(float))[has] > 0
    jumps[places] = (zeros[places] > _SOME_ZEROS) | (single & (limits.epsilon[places] <= EPSILON["float32"]))

    _parameter_conditions(lineage, of_gradient, larger, usable, a, norm, condition)
    amplification[pairs.phase == Phase.PARAMETER_GRADIENT] = PARAMETER_GRADIENT
    if drifted:
        condition *= LATER
    systematic = np.zeros(len(pairs), bool)
    systematic[forward] = ~limits.compound[frame] & (limits.epsilon[forward] <= EPSILON["float32"]) & (not drifted)
    return Conditions(
        exact=limits.exact,
        condition=condition,
        amplification=amplification,
        systematic=systematic & ~limits.exact,
        epsilon=limits.epsilon,
        jumps=jumps,
    )


def _offsets(lineage: Lineage, usable: np.ndarray, a: Table) -> np.ndarray:
    """Return for each frame the condition of the variance of its inputs.

    That is 1 + mean² / variance where it is computed from sums of x and x² (Higham, section 1.9; ONNX Runtime does so).
    """
    pairs = lineage.pairs
    taken = lineage.forward[pairs.a.kind[pairs.row_a[lineage.forward]] == INPUT]
    rows = pairs.measured_a[pairs.reference[taken]]
    mean, deviation = np.nan_to_num(a.mean[rows]), np.nan_to_num(a.std[rows])
    usable = usable[pairs.reference[taken]] & (deviation > 0)
    offset = np.divide(mean, deviation, out=np.zeros(len(rows)), where=usable) ** 2
    inside = [lineage.frame_of_call[call] for call in pairs.a.table.call[pairs.row_a[taken]].tolist()]
    found = np.ones(lineage.frames)
    np.maximum.at(found, np.array(inside, int), np.minimum(1 + offset, _LARGEST_OFFSET))
    return found


def _returned_conditions(
    lineage: Lineage, norm: np.ndarray, elements: np.ndarray, condition: np.ndarray, amplification: np.ndarray
) -> None:
    """Set the condition of gradients that come from outside, of a loss that is computed there.

    The gradient of a mean cross entropy is the difference of two distributions, each of norm 1 at most, over the number
    of rows: where they nearly agree, little but rounding is left.
    """
    pairs = lineage.pairs
    values = lineage.returned[pairs.gradient[lineage.returned] >= 0]
    places = pairs.gradient[values]
    last = np.array([max(shape[-1], 1) if shape else 1 for shape in map(pairs.a.table.shape.__getitem__,
                     pairs.row_a[places].tolist())])  # fmt: skip
    rows = np.maximum(elements[places] / np.maximum(last, 1), 1.0)
    condition[places] = np.maximum(condition[places], _ratio(np.sqrt(2.0 / rows), norm[places]))
    amplification[places] = COMPOUND


def _parameter_conditions(
    lineage: Lineage,
    of_gradient: np.ndarray,
    larger: np.ndarray,
    usable: np.ndarray,
    a: Table,
    norm: np.ndarray,
    condition: np.ndarray,
) -> None:
    """Set the condition of gradients of parameters, which are sums over rows of gradients times inputs.

    The sum may vanish but for rounding: the true gradient of the bias of attention's keys is 0, or of a bias in front
    of a batch normalization.
    """
    pairs = lineage.pairs
    elements = np.maximum(a.elements[pairs.measured_a], 1) * unsampled(pairs, a) ** 2
    last = np.array([shape[-1] if shape else 1 for shape in pairs.a.table.shape])[pairs.row_a]
    rows = np.sqrt(elements / np.maximum(last, 1))
    summed = gradient_of_frames(lineage, of_gradient * rows)
    plain = gradient_of_frames(lineage, of_gradient)
    value = np.zeros(lineage.frames)
    np.maximum.at(value, lineage.seen.frame, np.where(usable, larger, 0.0)[pairs.reference][lineage.seen.pair])
    at = pairs.phase[lineage.owned] == Phase.PARAMETER_GRADIENT
    owned, owner = lineage.owned[at], lineage.owner[at]
    terms = np.maximum(summed[owner], plain[owner] * value[owner])
    np.maximum.at(condition, owned, _ratio(terms, norm[owned]))


def _ratio(parts: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the condition of a result: how large its parts are; at least 1."""
    ratio = np.divide(parts, result, out=np.full(len(parts), 1.0), where=result > 0)
    # where there is nothing but rounding errors one run may have exactly 0
    ratio = np.where((result == 0) & (parts > 0), np.inf, ratio)
    return np.maximum(np.nan_to_num(ratio, nan=1.0, posinf=1e12), 1.0)
