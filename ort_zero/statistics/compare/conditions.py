"""Compute how much errors grow in each pair of a step, from the sizes of the values and of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

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
_SOME_ZEROS = 0.005
"""Share of zeros in a gradient from which a ReLU or maximum is assumed in the module."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step of two runs, with the result arrays `condition` and `amplification` to be filled."""

    dataflow: Dataflow
    limits: Limits
    tables: PairedTables
    parameters_differ: bool
    norm: np.ndarray
    """The larger of the two l2 norms of each pair, of whole tensors.

    Errors are relative to the larger norm: zeros in place of values are not a rounding error.
    """
    elements: np.ndarray
    """Number of elements of the whole tensors."""
    usable: np.ndarray
    """False where the size of a value has no meaning: for masks, integers and booleans."""
    bare: np.ndarray
    """True for each frame without parameters."""
    condition: np.ndarray
    amplification: np.ndarray

    @property
    def root(self) -> np.ndarray:
        """Square root of the number of elements of each pair."""
        return np.sqrt(self.elements)

    def inner(self) -> np.ndarray:
        """Return the pairs of the forward phase that a frame computed."""
        forward = self.dataflow.forward
        return forward[self.dataflow.frame[forward] >= 0]

    def with_gradient(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of the forward phase that have a gradient, and the pairs of their gradients."""
        gradients = self.tables.pairs.gradient[self.dataflow.forward]
        return self.dataflow.forward[gradients >= 0], gradients[gradients >= 0]

    def norms_of_gradients(self) -> np.ndarray:
        """Return for each pair of the forward phase the norm of its gradient, 0 for pairs without a gradient."""
        values, gradients = self.with_gradient()
        norms = np.zeros(len(self.norm))
        norms[values] = self.norm[gradients]
        return norms


def conditions_of(dataflow: Dataflow, limits: Limits, tables: PairedTables, *, parameters_differ: bool) -> Conditions:
    """Compute the error growth of each pair from the sizes of the values of a step.

    Args:
        dataflow: the inputs of each value.
        limits: the limits of the step's structure.
        tables: the tables of both runs.
        parameters_differ: the runs have different parameters. Errors from parameters are systematic and show in all
            small results; rounding errors are random and show only where much larger values cancel.
    """
    step = _step(dataflow, limits, tables, parameters_differ)
    _set_forward(step)
    _set_gradients(step)
    _set_returned(step)
    _set_parameter_gradients(step)
    if parameters_differ:
        step.condition[:] *= LATER
    return Conditions(
        exact=limits.exact,
        condition=step.condition,
        amplification=step.amplification,
        systematic=_systematic(step),
        epsilon=limits.epsilon,
        jumps=_jumps(step),
    )


def _step(dataflow: Dataflow, limits: Limits, tables: PairedTables, parameters_differ: bool) -> _Step:
    pairs, a = tables.pairs, tables.a
    rows = pairs.measured_a
    scale = tables.unsampled()
    norm = tables.larger_norm() * scale
    usable = ~limits.exact & (norm < _LARGEST_NORM)
    # a tensor of zeros and negative values is a mask for attention scores, whose size has no meaning
    usable &= ~((a.max[rows] <= 0) & (a.zero[rows] > 0) & (pairs.phase == Phase.FORWARD))
    bare = np.ones(dataflow.frames, bool)
    bare[dataflow.owners.frame] = False
    return _Step(
        dataflow=dataflow,
        limits=limits,
        tables=tables,
        parameters_differ=parameters_differ,
        norm=norm,
        elements=np.maximum(a.elements[rows], 1) * scale**2,
        usable=usable,
        bare=bare,
        condition=np.ones(len(pairs)),
        amplification=np.full(len(pairs), LEAF),
    )


def _set_forward(step: _Step) -> None:
    """Set the condition and amplification of values that frames computed."""
    dataflow, a = step.dataflow, step.tables.a
    rows, compound = step.tables.pairs.measured_a, step.limits.compound
    inner = step.inner()
    frame = dataflow.frame[inner]
    around = dataflow.largest_readable(np.where(step.usable, step.norm / step.root, 0.0))
    ratio = _ratio(around[frame], step.norm[inner] / step.root[inner])
    step.condition[inner] = ratio if step.parameters_differ else np.maximum(ratio / CANCELLATION, 1.0)
    step.condition[inner] *= np.where(compound, 1.0, _offsets(step))[frame]
    extent = np.maximum(np.abs(a.min[rows]), np.abs(a.max[rows]))
    extent = np.where(step.usable & np.isfinite(extent), extent, 0.0)
    by_input = np.clip(dataflow.largest_input(extent) / _LARGE_INPUT, 1.0, COMPOUND / LEAF)
    of_leaf = LEAF * np.where(step.bare, by_input, 1.0)
    of_compound = LEAF * np.clip(dataflow.largest_readable(extent) ** 2, 1.0, COMPOUND / LEAF)
    step.amplification[inner] = np.where(compound, of_compound, of_leaf)[frame]


def _offsets(step: _Step) -> np.ndarray:
    """Return for each frame the condition of the variance of its inputs.

    The condition is 1 + mean^2 / variance if the variance is computed from sums of x and x^2, as in ONNX Runtime
    (Higham, section 1.9).
    """
    pairs, a = step.tables.pairs, step.tables.a
    taken, frames = step.dataflow.inputs
    rows = pairs.measured_a[pairs.reference[taken]]
    mean, deviation = np.nan_to_num(a.mean[rows]), np.nan_to_num(a.std[rows])
    usable = step.usable[pairs.reference[taken]] & (deviation > 0)
    offset = np.divide(mean, deviation, out=np.zeros(len(rows)), where=usable) ** 2
    conditions = np.ones(step.dataflow.frames)
    np.maximum.at(conditions, frames, np.minimum(1 + offset, _LARGEST_OFFSET))
    return conditions


def _set_gradients(step: _Step) -> None:
    """Set the condition and amplification of gradients of activations."""
    values, gradients = step.with_gradient()
    incoming = step.dataflow.largest_gradient(step.norms_of_gradients())
    reaching = step.dataflow.largest_around(incoming)
    step.condition[gradients] = _ratio(reaching[values], step.norm[gradients])
    step.amplification[gradients] = BACKWARD


def _set_returned(step: _Step) -> None:
    """Set the condition and amplification of the gradients of the model's outputs, which come from the loss outside.

    The gradient of a mean cross entropy is the difference of two distributions, each of norm 1 at most, divided by the
    number of rows. Where the distributions nearly agree, the difference is mostly rounding errors.
    """
    pairs = step.tables.pairs
    gradients = pairs.gradient[step.dataflow.returned]
    gradients = gradients[gradients >= 0]
    shapes = [pairs.a.table.shape[row] for row in pairs.row_a[gradients].tolist()]
    last = np.array([max(shape[-1], 1) if shape else 1 for shape in shapes])
    rows = np.maximum(step.elements[gradients] / np.maximum(last, 1), 1.0)
    of_loss = _ratio(np.sqrt(2.0 / rows), step.norm[gradients])
    step.condition[gradients] = np.maximum(step.condition[gradients], of_loss)
    step.amplification[gradients] = COMPOUND


def _set_parameter_gradients(step: _Step) -> None:
    """Set the condition and amplification of gradients of parameters: sums over rows of gradients times inputs.

    The exact sum may be 0 and the computed sum a rounding error: for the bias of attention's keys, or a bias before a
    batch normalization.
    """
    pairs, dataflow = step.tables.pairs, step.dataflow
    of_gradients = step.norms_of_gradients()
    last = np.array([shape[-1] if shape else 1 for shape in pairs.a.table.shape])[pairs.row_a]
    rows = np.sqrt(step.elements / np.maximum(last, 1))
    summed = dataflow.largest_gradient(of_gradients * rows)
    plain = dataflow.largest_gradient(of_gradients)
    value = dataflow.largest_readable(np.where(step.usable, step.norm, 0.0))
    owners = dataflow.owners_of_gradients()
    terms = np.maximum(summed[owners.frame], plain[owners.frame] * value[owners.frame])
    np.maximum.at(step.condition, owners.pair, _ratio(terms, step.norm[owners.pair]))
    step.amplification[pairs.phase == Phase.PARAMETER_GRADIENT] = PARAMETER_GRADIENT


def _jumps(step: _Step) -> np.ndarray:
    """Return True for gradients that may jump when an input changes slightly: of ReLU at 0, of a maximum in a pool."""
    pairs, a, b = step.tables.pairs, step.tables.a, step.tables.b
    values, gradients = step.with_gradient()
    zeros = np.minimum(a.zero[pairs.measured_a], b.zero[pairs.measured_b])
    zeros = zeros / np.maximum(a.elements[pairs.measured_a], 1)
    single = step.dataflow.largest_around((step.bare & ~step.limits.compound).astype(float))[values] > 0
    jumps = np.zeros(len(pairs), bool)
    jumps[gradients] = (zeros[gradients] > _SOME_ZEROS) | (
        single & (step.limits.epsilon[gradients] <= EPSILON["float32"])
    )
    return jumps


def _systematic(step: _Step) -> np.ndarray:
    """Return True for values that one operator computed from equal parameters."""
    inner, limits = step.inner(), step.limits
    systematic = np.zeros(len(step.norm), bool)
    of_one_operator = ~limits.compound[step.dataflow.frame[inner]]
    systematic[inner] = of_one_operator & (limits.epsilon[inner] <= EPSILON["float32"]) & (not step.parameters_differ)
    return systematic & ~limits.exact


def _ratio(parts: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the condition of results: the size of their terms relative to the result, at least 1."""
    ratio = np.divide(parts, result, out=np.full(len(parts), 1.0), where=result > 0)
    # a result that consists of rounding errors may be exactly 0 in one run
    ratio = np.where((result == 0) & (parts > 0), np.inf, ratio)
    return np.maximum(np.nan_to_num(ratio, nan=1.0, posinf=1e12), 1.0)
