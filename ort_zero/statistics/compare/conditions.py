"""Compute how much errors grow in each pair of a step, from the sizes of the values and of their inputs."""

from __future__ import annotations

import numpy as np

from ort_zero.statistics.compare.align import PairedTables
from ort_zero.statistics.compare.dataflow import Dataflow
from ort_zero.statistics.compare.tolerance import EPSILON, Conditions, Limits
from ort_zero.statistics.records import Phase

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


def conditions_of(dataflow: Dataflow, limits: Limits, tables: PairedTables, *, parameters_differ: bool) -> Conditions:
    """Compute the error growth of each pair from the sizes of the values of a step.

    Args:
        dataflow: the inputs of each value.
        limits: the limits of the step's structure.
        tables: the tables of both runs.
        parameters_differ: the runs have different parameters. Errors from parameters are systematic and show in all
            small results; rounding errors are random and show only where much larger values cancel.
    """
    step = _Step(dataflow, limits, tables, parameters_differ)
    step.set_forward()
    step.set_gradients()
    step.set_returned()
    step.set_parameter_gradients()
    return Conditions(
        exact=limits.exact,
        condition=step.condition * (LATER if parameters_differ else 1.0),
        amplification=step.amplification,
        systematic=step.systematic(),
        epsilon=limits.epsilon,
        jumps=step.jumps(),
    )


class _Step:
    """The sizes of the values of one step, from which its methods set `condition` and `amplification` of each pair."""

    def __init__(self, dataflow: Dataflow, limits: Limits, tables: PairedTables, parameters_differ: bool):
        self.dataflow, self.limits, self.tables, self.parameters_differ = dataflow, limits, tables, parameters_differ
        self.pairs, self.a = tables.pairs, tables.a
        rows, scale = self.pairs.measured_a, tables.unsampled()
        self.norm = tables.larger_norm() * scale
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
        by_input = np.clip(dataflow.largest_input(extent) / _LARGE_INPUT, 1.0, COMPOUND / LEAF)
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
        incoming = self.dataflow.largest_gradient(self.norm_of_gradient)
        reaching = self.dataflow.largest_around(incoming)
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
