"""Operators of ATen nodes: a linear layer and the cross entropy of its results, with all gradients, in one.

The forward computes the gradients as well, chunk by chunk of the rows that have a label; the backward multiplies them
by the gradient of the loss. All work on float32 on the CPU.
"""

from __future__ import annotations

import functools

import torch

from ort_zero.ortmodule.compat.ort_kernels import LOGITS_AT_ONCE, loss_slice
from ort_zero.ortmodule.compat.ortmodule import register_aten_gradient
from ort_zero.ortmodule.compat.torch_operators import new_library
from ort_zero.ortmodule.compat.torch_products import product

NAMESPACE = "ort_zero_loss"
COPY = f"{NAMESPACE}::copy"
"""Name of the operator that copies its input."""
ADD_ROWS = f"{NAMESPACE}::add_rows"
"""Name of the operator that adds the gradient of an embedding to that of a table of which nobody else knows."""
CHUNK = LOGITS_AT_ONCE
"""Number of logits that exist at a time: 32 MiB. A smaller chunk makes the sum of the weight's gradient slower."""
LEAST_ROWS = 128
"""Rows in a chunk of :data:`SMALL_CHUNK` logits, at least: with less of them their products become slow."""
SMALL_CHUNK = 1 << 20
"""Number of logits that exist at a time where a memory plan counts them: 4 MiB."""
_BLOCK = 1 << 17
"""Number of logits of which one thread computes the softmax before it goes on: 512 KiB stay in a core's cache."""

_SMALL = 1e-30
"""Probability of a label below which its logarithm is not taken of it: near the smallest float32 it loses digits."""

_INPUTS = "Tensor labels, int ignored, bool mean, bool weight_gradient, int at_once"
_SCHEMAS = (
    f"loss(Tensor hidden, Tensor weight, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    f"loss_bias(Tensor hidden, Tensor weight, Tensor bias, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"loss_copies(Tensor hidden, Tensor weight, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"loss_bias_copies(Tensor hidden, Tensor weight, Tensor bias, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "copy(Tensor values) -> Tensor",
    "scaled(Tensor grad, Tensor(a!) values) -> Tensor(a!)",
    "scaled_sum(Tensor grad, Tensor(a!) values, Tensor other) -> Tensor(a!)",
    "add_rows(Tensor(a!) table, Tensor grad, Tensor indices, int padding) -> Tensor(a!)",
)


def name_of(*, bias: bool, copies: bool) -> str:
    """Return the name of the operator with its namespace.

    Args:
        bias: the linear layer has one.
        copies: weight and bias are copied, for logits that are computed later.
    """
    return f"{NAMESPACE}::loss{'_bias' * bias}{'_copies' * copies}"


ROWS_AND_LABELS = {
    name_of(bias=bias, copies=copies): (0, 2 + bias) for bias in (False, True) for copies in (False, True)
}
"""Numbers of the inputs that hold rows and labels, by the name of the operator; the ignored label comes next."""


def loss(hidden, weight, labels, ignored, mean, weight_gradient, at_once):
    """Return the loss and the gradients of `hidden` and `weight`, see :func:`loss_and_gradients`."""
    return loss_and_gradients(hidden, weight, None, labels, ignored, mean, weight_gradient, at_once)[:3]


def loss_bias(hidden, weight, bias, labels, ignored, mean, weight_gradient, at_once):
    """Return the loss and the gradients of `hidden`, `weight` and `bias`, see :func:`loss_and_gradients`."""
    return loss_and_gradients(hidden, weight, bias, labels, ignored, mean, weight_gradient, at_once)


def loss_copies(hidden, weight, labels, ignored, mean, weight_gradient, at_once):
    """Return what :func:`loss` returns, and a copy of `weight`."""
    return *loss(hidden, weight, labels, ignored, mean, weight_gradient, at_once), weight.clone()


def loss_bias_copies(hidden, weight, bias, labels, ignored, mean, weight_gradient, at_once):
    """Return what :func:`loss_bias` returns, and copies of `weight` and `bias`."""
    found = loss_bias(hidden, weight, bias, labels, ignored, mean, weight_gradient, at_once)
    return *found, weight.clone(), bias.clone()


def copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values`."""
    return values.clone()


def scaled(grad: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply `values` by `grad`, a single element, in place, and return it: only one backward runs for a forward."""
    factor = grad.item()
    return values if factor == 1.0 else values.mul_(factor)


def scaled_sum(grad: torch.Tensor, values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Do what :func:`scaled` does, and add `other`, of which one element of zero stands for none."""
    result = scaled(grad, values)
    return result.add_(other) if other.shape == values.shape else result


def add_rows(table: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
    """Add the gradient of an embedding to the rows of `table` that it has read, in place, and return that.

    Args:
        table: [rows, width].
        grad: [..., width], of the embedding's results.
        indices: [...], integers.
        padding: row that gets no gradient; -1 for none.
    """
    rows, of_rows = indices.reshape(-1), grad.reshape(-1, table.shape[1])
    if padding >= 0:
        counts = rows != padding
        rows, of_rows = rows[counts], of_rows[counts]
    return table.index_add_(0, rows, of_rows)


def loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignored: int,
    mean: bool,
    weight_gradient: bool,
    at_once: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cross entropy of a linear layer, and the gradients of its input, weight and bias.

    Args:
        hidden: [..., width].
        weight: [classes, width].
        bias: [classes], or None.
        labels: one for each row of `hidden`, integers.
        ignored: the label of a row that has none; such rows are not computed.
        mean: divide by the number of labels; else the loss is their sum.
        weight_gradient: whether that of the weight is wanted; it is empty otherwise.
        at_once: number of logits that exist at a time, if that is a row's or more.

    Raises:
        RuntimeError: a label is no class, or there are not as many as rows.
    """
    classes, width = weight.shape
    flat, labels = hidden.reshape(-1, width), labels.reshape(-1).long()
    if len(labels) != len(flat):
        raise RuntimeError(f"there are {len(labels)} labels for {len(flat)} rows of logits")
    rows = torch.nonzero(labels != ignored).squeeze(1)
    every = len(rows) == len(labels)
    of_rows = torch.empty_like(flat) if every else flat.new_zeros(flat.shape)
    of_weight = weight.new_empty(0)
    of_bias = weight.new_zeros(classes if bias is not None else 0)
    total = torch.zeros((), dtype=torch.float64)
    scale = 1 / len(rows) if mean and len(rows) else 1.0
    size = max(1, at_once // classes)
    step = loss_slice(at_once)
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        states = flat[at : at + size] if every else flat[part]
        logits = product(states, weight.t(), bias)
        total += _into_gradient(logits, labels[part], scale)
        gradient = product(logits, weight)
        if every:
            of_rows[at : at + size] = gradient
        else:
            of_rows[part] = gradient
        if weight_gradient and not at and len(rows) <= size:
            of_weight = product(logits.t(), states)
        elif weight_gradient:
            of_weight = _add_product(of_weight if at else None, logits, states, step)
        if bias is not None:
            of_bias += logits.sum(0)
        del logits
    if not len(rows) and weight_gradient:
        of_weight = torch.zeros_like(weight)
    value = total * scale if len(rows) or not mean else total / 0  # PyTorch's mean over nothing is not a number
    return value.float(), of_rows.reshape(hidden.shape), of_weight, of_bias


def _into_gradient(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """Put the gradient of the loss in the place of `logits`; return the sum of the rows' losses.

    Args:
        logits: [rows, classes].
        labels: [rows].
        scale: factor of each row's loss in the whole one.
    """
    rows, classes = logits.shape
    picked, chosen = labels.unsqueeze(1), logits.new_empty(rows, 1)
    less = logits.new_full((rows, 1), -scale)
    size = max(1, _BLOCK * torch.get_num_threads() // classes)
    scratch = logits.new_empty(min(size, rows), classes)
    for at in range(0, rows, size):
        block, label = logits[at : at + size], picked[at : at + size]
        probabilities = torch.softmax(block, 1, out=scratch[: len(block)])
        of_label = torch.gather(probabilities, 1, label, out=chosen[at : at + size])
        if of_label.min() > _SMALL:
            of_label.log_()
        else:
            torch.gather(torch.log_softmax(block, 1), 1, label, out=of_label)
        torch.mul(probabilities, scale, out=block).scatter_add_(1, label, less[at : at + size])
    return chosen.sum(dtype=torch.float64).neg_()


def _add_product(
    target: torch.Tensor | None, gradient: torch.Tensor, states: torch.Tensor, at_once: int
) -> torch.Tensor:
    """Return the gradient of a weight by one chunk of rows, added to `target`, which is changed.

    Args:
        target: [classes, width]; None for the first chunk.
        gradient: [rows, classes], of the logits.
        states: [rows, width].
        at_once: number of classes that are computed at a time.
    """
    classes = gradient.shape[1]
    result = states.new_empty(classes, states.shape[1]) if target is None else target
    for at in range(0, classes, at_once):
        part = product(gradient[:, at : at + at_once].t(), states)
        if target is None:
            result[at : at + at_once] = part
        else:
            result[at : at + at_once] += part
    return result


@functools.cache
def _library() -> torch.library.Library:
    library = new_library(NAMESPACE, _SCHEMAS, globals())
    register_aten_gradient(COPY, [(COPY, ["GO(0)"], ["GI(0)"])])
    for bias in (False, True):
        for copies in (False, True):
            count = 3 if bias else 2
            definition = [("scaled", ["GO(0)", "O(1)"], ["GI(0)"])]
            for i in range(1, count):
                given = [f"GO({count + i})"] if copies else []
                name = "scaled_sum" if copies else "scaled"
                definition.append((name, ["GO(0)", f"O({i + 1})", *given], [f"GI({i})"]))
            nodes = [(f"{NAMESPACE}::{name}", inputs, outputs) for name, inputs, outputs in definition]
            register_aten_gradient(name_of(bias=bias, copies=copies), nodes)
    return library


def register() -> None:
    """Let PyTorch, ORT's executor of ATen nodes and ORT's gradient builder know the operators; once in a process."""
    _library()
