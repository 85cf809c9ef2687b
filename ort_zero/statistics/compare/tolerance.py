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

from ort_zero.statistics.compare.align import PairedTables
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
LEAF = 12.0
"""Amplification by a module without children: one operator."""
COMPOUND = 64.0
"""Amplification by code between children: several operators, among them softmax of large scores."""
LATER = 8.0
"""Factor on the limit in steps after the parameters differ: an error of the code is found in the first step, and later
tiny values, as behind many normalizations, amplify the difference of the parameters."""
BACKWARD = 16.0
PARAMETER_GRADIENT = 8.0
_LARGE_INPUT = 8.0
"""Size of inputs above which the amplification grows with the size: exp amplifies relative errors by its input.
:data:`LEAF` covers smaller inputs."""
_LARGEST_NORM = 1e30
"""Norm from which a value is taken for a mask, such as a mask of the smallest number of a dtype."""
_LARGEST_OFFSET = 1e3
CANCELLATION = 8.0
"""Factor by which a linear layer with small weights makes values smaller without any cancellation."""
_SHARE_OF_TERMS = 0.01
"""Size of the terms of a gradient's sum, as a share of the norm of all gradients, where the terms are not recorded."""
_SOME_ZEROS = 0.005
"""Share of zeros in a gradient from which a ReLU or maximum is assumed in the module."""


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

    In runs that differ in dtype on purpose, the coarser dtype of a pair sets its epsilon. Otherwise the finer one does,
    and a coarser tensor in one run alone is a difference.
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


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """The growth of rounding errors and inherited errors in each pair; see :func:`conditions_of`."""

    limits: Limits
    condition: np.ndarray
    amplification: np.ndarray
    systematic: np.ndarray
    """True for values that one operator computed from equal parameters, see :meth:`norm_tolerance`."""
    jumps: np.ndarray
    """True for gradients that may jump when an input changes slightly: of ReLU at 0, of a maximum in a pool."""

    def tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return the largest error of each pair that rounding and `inherited` explain."""
        epsilon = self.limits.epsilon
        floor = epsilon * np.where(epsilon > EPSILON["float32"], HALF_FLOOR, FLOOR)
        inexact = (floor + self.amplification * inherited) * self.condition
        inexact = inexact + np.where(self.jumps, np.sqrt(JUMP * inherited), 0.0)
        # if a fraction x of the elements of an exact tensor changes, the relative error is sqrt(x)
        return np.where(self.limits.exact, np.sqrt(self.amplification * inherited), inexact)

    def norm_tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return the largest difference of norms that `inherited` explains, inf for pairs whose norms are not checked.

        Rounding errors have both signs and hardly change a norm: in correct runs, norms differed by at most a third of
        a dtype's epsilon. A different ``eps`` of a normalization scales all elements in the same direction.
        """
        limit = (NORM_FLOOR * self.limits.epsilon + NORM_INHERITED * inherited) * self.condition
        return np.where(self.systematic, limit, np.inf)


def conditions_of(dataflow: Dataflow, limits: Limits, tables: PairedTables, *, parameters_differ: bool) -> Conditions:
    """Compute the error growth of each pair from the sizes of the values of a step.

    Errors from different parameters are systematic and show in all small results. Rounding errors are random and show
    only where much larger values cancel.
    """
    step = _Step(dataflow, limits, tables, parameters_differ)
    step.set_forward()
    step.set_gradients()
    step.set_returned()
    step.set_parameter_gradients()
    return Conditions(
        limits=limits,
        condition=step.condition * (LATER if parameters_differ else 1.0),
        amplification=step.amplification,
        systematic=step.systematic(),
        jumps=step.jumps(),
    )


class _Step:
    """The sizes of the values of one step, from which its methods set `condition` and `amplification` of each pair."""

    def __init__(self, dataflow: Dataflow, limits: Limits, tables: PairedTables, parameters_differ: bool):
        self.dataflow, self.limits, self.tables, self.parameters_differ = dataflow, limits, tables, parameters_differ
        self.pairs, self.a = tables.pairs, tables.a
        rows, scale = self.pairs.measured_a, tables.unsampled()
        self.norm = np.maximum(self.a.l2[rows], tables.b.l2[self.pairs.measured_b]) * scale
        """The larger of the two l2 norms of each pair, of whole tensors: zeros in place of values are no rounding
        error."""
        self.elements = np.maximum(self.a.elements[rows], 1) * scale**2
        """Number of elements of the whole tensors."""
        # a tensor of zeros and negative values is a mask for attention scores
        masks = (self.a.max[rows] <= 0) & (self.a.zero[rows] > 0) & (self.pairs.phase == Phase.FORWARD)
        self.usable = ~limits.exact & (self.norm < _LARGEST_NORM) & ~masks
        """False where the size of a value has no meaning: for masks, integers and booleans."""
        self.bare = np.ones(dataflow.frames, bool)
        """True for each frame without parameters."""
        self.bare[dataflow.owners.frame] = False
        self.condition = np.ones(len(self.pairs))
        self.amplification = np.full(len(self.pairs), LEAF)
        values, gradients = dataflow.with_gradient()
        self.norm_of_gradient = np.zeros(len(self.pairs))
        """For each pair of the forward phase the norm of its gradient, 0 for pairs without a gradient."""
        self.norm_of_gradient[values] = self.norm[gradients]

    def set_forward(self) -> None:
        """Set the condition and amplification of values that frames computed."""
        dataflow, a = self.dataflow, self.a
        rows, compound = self.pairs.measured_a, self.limits.compound
        inner, root = dataflow.inner(), np.sqrt(self.elements)
        frame = dataflow.frame[inner]
        around = dataflow.largest_readable(np.where(self.usable, self.norm / root, 0.0))
        ratio = _ratio(around[frame], self.norm[inner] / root[inner])
        self.condition[inner] = ratio if self.parameters_differ else np.maximum(ratio / CANCELLATION, 1.0)
        self.condition[inner] *= np.where(compound, 1.0, self._offsets())[frame]
        extent = np.maximum(np.abs(a.min[rows]), np.abs(a.max[rows]))
        extent = np.where(self.usable & np.isfinite(extent), extent, 0.0)
        largest_input = dataflow.inputs.largest_of_frames(dataflow.frames, extent[self.pairs.reference])
        by_input = np.clip(largest_input / _LARGE_INPUT, 1.0, COMPOUND / LEAF)
        of_leaf = LEAF * np.where(self.bare, by_input, 1.0)
        of_compound = LEAF * np.clip(dataflow.largest_readable(extent) ** 2, 1.0, COMPOUND / LEAF)
        self.amplification[inner] = np.where(compound, of_compound, of_leaf)[frame]

    def _offsets(self) -> np.ndarray:
        """Return for each frame the condition of the variance of its inputs.

        The condition is 1 + mean^2 / variance if the variance is computed from sums of x and x^2, as in ONNX Runtime
        (Higham, section 1.9).
        """
        pairs, a = self.pairs, self.a
        taken, frames = self.dataflow.inputs
        rows = pairs.measured_a[pairs.reference[taken]]
        mean, deviation = np.nan_to_num(a.mean[rows]), np.nan_to_num(a.std[rows])
        usable = self.usable[pairs.reference[taken]] & (deviation > 0)
        offset = np.divide(mean, deviation, out=np.zeros(len(rows)), where=usable) ** 2
        conditions = np.ones(self.dataflow.frames)
        np.maximum.at(conditions, frames, np.minimum(1 + offset, _LARGEST_OFFSET))
        return conditions

    def set_gradients(self) -> None:
        """Set the condition and amplification of gradients of activations."""
        values, gradients = self.dataflow.with_gradient()
        reaching = self.dataflow.largest_around(self.dataflow.largest_gradient(self.norm_of_gradient))
        self.condition[gradients] = _ratio(reaching[values], self.norm[gradients])
        self.amplification[gradients] = BACKWARD

    def set_returned(self) -> None:
        """Set the condition and amplification of gradients of the model's outputs, which come from a loss outside.

        The gradient of a mean cross entropy is the difference of two distributions, each of norm 1 at most, divided by
        the number of rows. Where the distributions nearly agree, the difference is mostly rounding errors.
        """
        pairs = self.pairs
        gradients = pairs.gradient[self.dataflow.returned]
        gradients = gradients[gradients >= 0]
        shapes = [pairs.a.table.shape[row] for row in pairs.row_a[gradients].tolist()]
        last = np.array([max(shape[-1], 1) if shape else 1 for shape in shapes])
        rows = np.maximum(self.elements[gradients] / np.maximum(last, 1), 1.0)
        of_loss = _ratio(np.sqrt(2.0 / rows), self.norm[gradients])
        self.condition[gradients] = np.maximum(self.condition[gradients], of_loss)
        self.amplification[gradients] = COMPOUND

    def set_parameter_gradients(self) -> None:
        """Set the condition and amplification of gradients of parameters: sums over rows of gradients times inputs.

        The exact sum may be 0 and the computed sum a rounding error: for the bias of attention's keys, or a bias before
        a batch normalization.
        """
        pairs, dataflow = self.pairs, self.dataflow
        of_gradients = self.norm_of_gradient
        last = np.array([shape[-1] if shape else 1 for shape in pairs.a.table.shape])[pairs.row_a]
        rows = np.sqrt(self.elements / np.maximum(last, 1))
        summed = dataflow.largest_gradient(of_gradients * rows)
        plain = dataflow.largest_gradient(of_gradients)
        value = dataflow.largest_readable(np.where(self.usable, self.norm, 0.0))
        owners = dataflow.owners_of_gradients()
        terms = np.maximum(summed[owners.frame], plain[owners.frame] * value[owners.frame])
        np.maximum.at(self.condition, owners.pair, _ratio(terms, self.norm[owners.pair]))
        gradients = pairs.phase == Phase.PARAMETER_GRADIENT
        self.amplification[gradients] = PARAMETER_GRADIENT
        if not (pairs.phase == Phase.FORWARD).any():
            terms = np.full(len(pairs), _SHARE_OF_TERMS * np.linalg.norm(self.norm[gradients]))
            self.condition[gradients] = _ratio(terms, self.norm)[gradients]

    def jumps(self) -> np.ndarray:
        """Return True for gradients that may jump when an input changes slightly: of ReLU at 0, of a maximum."""
        pairs, a, b = self.pairs, self.a, self.tables.b
        values, gradients = self.dataflow.with_gradient()
        zeros = np.minimum(a.zero[pairs.measured_a], b.zero[pairs.measured_b])
        zeros = zeros / np.maximum(a.elements[pairs.measured_a], 1)
        single = self.dataflow.largest_around((self.bare & ~self.limits.compound).astype(float))[values] > 0
        jumps = np.zeros(len(pairs), bool)
        jumps[gradients] = (zeros[gradients] > _SOME_ZEROS) | (
            single & (self.limits.epsilon[gradients] <= EPSILON["float32"])
        )
        return jumps

    def systematic(self) -> np.ndarray:
        """Return True for values that one operator computed from equal parameters."""
        inner, limits = self.dataflow.inner(), self.limits
        systematic = np.zeros(len(self.norm), bool)
        of_one_operator = ~limits.compound[self.dataflow.frame[inner]]
        systematic[inner] = (
            of_one_operator & (limits.epsilon[inner] <= EPSILON["float32"]) & (not self.parameters_differ)
        )
        return systematic & ~limits.exact


def _ratio(parts: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the condition of results: the size of their terms relative to the result, at least 1."""
    ratio = np.divide(parts, result, out=np.full(len(parts), 1.0), where=result > 0)
    # a result that consists of rounding errors may be exactly 0 in one run
    ratio = np.where((result == 0) & (parts > 0), np.inf, ratio)
    return np.maximum(np.nan_to_num(ratio, nan=1.0, posinf=1e12), 1.0)
