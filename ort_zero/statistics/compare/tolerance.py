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

import numpy as np

from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.compare.step import StepComparison
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
_SOME_ZEROS = 0.005
"""Share of zeros in a gradient from which a ReLU or maximum is assumed in the module."""


def epsilons(dtypes: list[str]) -> np.ndarray:
    """Return the distance from 1 to the next number in each dtype; 0 for integers and booleans."""
    return np.array([EPSILON.get(dtype, 0.0) for dtype in dtypes])


class Conditions:
    """The growth of rounding errors and inherited errors in each pair of a step, from the sizes of its values.

    Errors from different parameters are systematic and show in all small results. Rounding errors are random and show
    only where much larger values cancel.

    Attributes:
        condition: magnifies the rounding error and the inherited error of each pair.
        amplification: magnifies the inherited error.
    """

    def __init__(self, step: StepComparison, dataflow: Dataflow, other_dtype: bool, *, parameters_differ: bool):
        self.pairs, self.a, self.b = step.pairs, step.a, step.b
        self.dataflow, self.parameters_differ = dataflow, parameters_differ
        rows, scale = self.pairs.a.measured, step.unsampled()
        self._set_epsilon(other_dtype)
        self.norm = np.maximum(self.a.l2[rows], self.b.l2[self.pairs.b.measured]) * scale
        """The larger l2 norm of the two whole tensors of each pair."""
        self.elements = np.maximum(self.a.elements[rows], 1) * scale**2
        """Number of elements of the whole tensors."""
        # a tensor of zeros and negative values is a mask for attention scores
        masks = (self.a.max[rows] <= 0) & (self.a.zero[rows] > 0) & (self.pairs.phase == Phase.FORWARD)
        self.usable = ~self.exact & (self.norm < _LARGEST_NORM) & ~masks
        """False where the size of a value has no meaning: for masks, integers and booleans."""
        self.bare = np.ones(self.dataflow.frames, bool)
        """True for each frame without parameters."""
        self.bare[self.dataflow.owners.frame] = False
        self.condition = np.ones(len(self.pairs))
        self.amplification = np.full(len(self.pairs), LEAF)
        values, gradients = self.dataflow.with_gradient()
        self.norm_of_gradient = np.zeros(len(self.pairs))
        """For each pair of the forward phase the norm of its gradient, 0 for pairs without a gradient."""
        self.norm_of_gradient[values] = self.norm[gradients]
        self._set_forward()
        self._set_gradients()
        self._set_returned()
        self._set_parameter_gradients()
        self.condition *= LATER if parameters_differ else 1.0

    def tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return the largest error of each pair that rounding and `inherited` explain."""
        floor = self.epsilon * np.where(self.epsilon > EPSILON["float32"], HALF_FLOOR, FLOOR)
        inexact = (floor + self.amplification * inherited) * self.condition
        inexact = inexact + np.where(self._jumps(), np.sqrt(JUMP * inherited), 0.0)
        # if a fraction x of the elements of an exact tensor changes, the relative error is sqrt(x)
        return np.where(self.exact, np.sqrt(self.amplification * inherited), inexact)

    def norm_tolerance(self, inherited: np.ndarray) -> np.ndarray:
        """Return the largest difference of norms that `inherited` explains, inf for pairs whose norms are not checked.

        Norms are checked of values that one operator computed from equal parameters. Rounding errors have both signs
        and hardly change a norm: in correct runs, norms differed by at most a third of a dtype's epsilon. A different
        ``eps`` of a normalization scales all elements in the same direction.
        """
        inner = self.dataflow.inner()
        checked = np.zeros(len(self.pairs), bool)
        checked[inner] = ~self.dataflow.compound[self.dataflow.frame[inner]]
        checked &= (self.epsilon <= EPSILON["float32"]) & ~self.exact & (not self.parameters_differ)
        limit = (NORM_FLOOR * self.epsilon + NORM_INHERITED * inherited) * self.condition
        return np.where(checked, limit, np.inf)

    def _set_epsilon(self, other_dtype: bool) -> None:
        """Set the epsilon of the coarsest dtype among each value and the inputs of its computation.

        In runs that differ in dtype on purpose, the coarser dtype of a pair sets its epsilon. Otherwise the finer one
        does, and a coarser tensor in one run alone is a difference.
        """
        pairs, dataflow = self.pairs, self.dataflow
        a, b = epsilons(self.a.dtype)[pairs.a.rows], epsilons(self.b.dtype)[pairs.b.rows]
        both = np.maximum(a, b) if other_dtype else np.minimum(a, b)
        of_frames = dataflow.readable.largest_of_frames(dataflow.frames, both)
        self.epsilon = both.copy()
        inner = dataflow.inner()
        self.epsilon[inner] = np.maximum(both[inner], of_frames[dataflow.frame[inner]])
        values, gradients = dataflow.with_gradient()
        self.epsilon[gradients] = np.maximum(both[gradients], dataflow.largest_around(of_frames)[values])
        owners = dataflow.owners_of_gradients()
        np.maximum.at(self.epsilon, owners.pair, of_frames[owners.frame])
        self.exact = (a == 0) & (b == 0)
        """True for integers and booleans."""

    def _set_forward(self) -> None:
        """Set the condition and amplification of values that frames computed."""
        dataflow, a = self.dataflow, self.a
        rows, compound = self.pairs.a.measured, dataflow.compound
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
        rows = pairs.a.measured[pairs.reference[taken]]
        mean, deviation = np.nan_to_num(a.mean[rows]), np.nan_to_num(a.std[rows])
        usable = self.usable[pairs.reference[taken]] & (deviation > 0)
        offset = np.divide(mean, deviation, out=np.zeros(len(rows)), where=usable) ** 2
        conditions = np.ones(self.dataflow.frames)
        np.maximum.at(conditions, frames, np.minimum(1 + offset, _LARGEST_OFFSET))
        return conditions

    def _set_gradients(self) -> None:
        """Set the condition and amplification of gradients of activations."""
        values, gradients = self.dataflow.with_gradient()
        reaching = self.dataflow.largest_around(self.dataflow.largest_gradient(self.norm_of_gradient))
        self.condition[gradients] = _ratio(reaching[values], self.norm[gradients])
        self.amplification[gradients] = BACKWARD

    def _set_returned(self) -> None:
        """Set the condition and amplification of gradients of the model's outputs, which come from a loss outside.

        The gradient of a mean cross entropy is the difference of two distributions, each of norm 1 at most, divided by
        the number of rows. Where the distributions nearly agree, the difference is mostly rounding errors.
        """
        pairs = self.pairs
        gradients = pairs.gradient[self.dataflow.returned]
        gradients = gradients[gradients >= 0]
        shapes = [self.a.shape[row] for row in pairs.a.rows[gradients].tolist()]
        last = np.array([max(shape[-1], 1) if shape else 1 for shape in shapes])
        rows = np.maximum(self.elements[gradients] / np.maximum(last, 1), 1.0)
        of_loss = _ratio(np.sqrt(2.0 / rows), self.norm[gradients])
        self.condition[gradients] = np.maximum(self.condition[gradients], of_loss)
        self.amplification[gradients] = COMPOUND

    def _set_parameter_gradients(self) -> None:
        """Set the condition and amplification of gradients of parameters: sums over rows of gradients times inputs.

        The exact sum may be 0 and the computed sum a rounding error: for the bias of attention's keys, or a bias before
        a batch normalization.
        """
        pairs, dataflow = self.pairs, self.dataflow
        of_gradients = self.norm_of_gradient
        last = np.array([shape[-1] if shape else 1 for shape in self.a.shape])[pairs.a.rows]
        rows = np.sqrt(self.elements / np.maximum(last, 1))
        summed = dataflow.largest_gradient(of_gradients * rows)
        plain = dataflow.largest_gradient(of_gradients)
        value = dataflow.largest_readable(np.where(self.usable, self.norm, 0.0))
        owners = dataflow.owners_of_gradients()
        terms = np.maximum(summed[owners.frame], plain[owners.frame] * value[owners.frame])
        np.maximum.at(self.condition, owners.pair, _ratio(terms, self.norm[owners.pair]))
        gradients = pairs.phase == Phase.PARAMETER_GRADIENT
        self.amplification[gradients] = PARAMETER_GRADIENT

    def _jumps(self) -> np.ndarray:
        """Return True for gradients that may jump when an input changes slightly: of ReLU at 0, of a maximum."""
        pairs, a, b = self.pairs, self.a, self.b
        gradients = self.dataflow.with_gradient()[1]
        zeros = np.minimum(a.zero[pairs.a.measured], b.zero[pairs.b.measured])
        zeros = zeros / np.maximum(a.elements[pairs.a.measured], 1)
        jumps = np.zeros(len(pairs), bool)
        jumps[gradients] = zeros[gradients] > _SOME_ZEROS
        return jumps


def _ratio(parts: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the condition of results: the size of their terms relative to the result, at least 1."""
    ratio = np.divide(parts, result, out=np.full(len(parts), 1.0), where=result > 0)
    # a result that consists of rounding errors may be exactly 0 in one run
    ratio = np.where((result == 0) & (parts > 0), np.inf, ratio)
    return np.maximum(np.nan_to_num(ratio, nan=1.0, posinf=1e12), 1.0)
