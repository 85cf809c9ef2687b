"""Compute a head and its cross entropy in chunks of rows with labels, where one graph of Dynamo has both.

Logits of a large vocabulary are the largest values of a step. The operator makes them chunk by chunk, and turns each
chunk into its own gradient at once. Rows whose label is ignored are never computed.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

LEAST_CLASSES = 4096
"""Number of classes from which the logits are worth it."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of hidden states and weight. Not float16: gradients are computed before a loss scale could multiply them."""
_CHUNK = 1 << 23
"""Logits of a chunk on a CPU: 32 MiB in float32. Products of few rows are slow."""
_CHUNK_ON_GPU = 1 << 26
"""Logits of a chunk on a GPU, where many small calls take longer than their kernels."""
_SAME_ROWS = frozenset("view reshape contiguous float to".split())
"""Tensor methods after which a row of logits is still a row, in the same order."""
_SIGNATURE = inspect.signature(F.cross_entropy)


Product = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Products:
    """The products of matrices of a head and its loss."""

    logits: Product
    """Multiplies rows of hidden states with the head's weight, and adds a bias."""
    for_hidden: Product
    """Multiplies gradients of logits with the head's weight."""
    for_weight: Product
    """Multiplies the transpose of gradients of logits with rows of hidden states."""


IN_PYTORCH = Products(F.linear, torch.mm, lambda gradient, states: gradient.T @ states)
ProductsOf = Callable[[torch.Tensor, torch.Tensor | None], Products]
"""Returns the functions that multiply a head's matrices, for the head's weight and bias."""
_products: weakref.WeakValueDictionary[int, Products] = weakref.WeakValueDictionary()
"""Maps the last argument of ``ort_zero::linear_cross_entropy`` to functions, which no operator of torch takes."""
_numbers = itertools.count()

LossGradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The gradients of hidden states, weight and bias; None for a weight or bias without one."""


def loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignored: int,
    mean: bool,
    trains: bool,
    products: Products,
) -> tuple[torch.Tensor, LossGradients]:
    """Return the cross entropy of a linear layer's results, and its gradients.

    Args:
        hidden: hidden states, float [rows, width].
        weight: the layer's weight, float [classes, width].
        bias: the layer's bias, float [classes], or None.
        labels: a class for each row, int64 [rows].
        ignored: the label of rows that do not count.
        mean: return the mean over the rows that count, else the sum.
        trains: compute the gradients of weight and bias.
        products: multiply the matrices.
    """
    rows = (labels != ignored).nonzero().squeeze(1)
    factor = 1 / max(len(rows), 1) if mean else 1.0
    loss = torch.zeros((), device=hidden.device)
    for_hidden = torch.zeros_like(hidden)
    for_weight = for_bias = None
    logits_at_once = _CHUNK if hidden.device.type == "cpu" else _CHUNK_ON_GPU
    for chunk in rows.split(max(1, logits_at_once // len(weight))):
        states, right = hidden[chunk], labels[chunk].unsqueeze(1)
        logits = products.logits(states, weight, bias).float()
        largest, chosen = logits.amax(1, keepdim=True), logits.gather(1, right)
        powers = logits.sub_(largest).exp_()
        total = powers.sum(1, keepdim=True)
        loss += (largest + total.log() - chosen).sum() * factor
        # a row's gradient times its total: the narrow factors of the products are divided instead
        gradient = powers.scatter_add_(1, right, -total).to(weight.dtype)
        share = factor / total
        for_hidden[chunk] = (products.for_hidden(gradient, weight) * share).to(hidden.dtype)
        scaled = (states * share).to(weight.dtype)
        if trains and for_weight is None:
            for_weight = products.for_weight(gradient, scaled)
        elif for_weight is not None:
            for_weight = for_weight.float()  # only a sum of several chunks needs float32, a copy of the weight's size
            is_whole = for_weight.dtype is weight.dtype
            for_weight.addmm_(gradient.T, scaled) if is_whole else for_weight.add_(gradient.T @ scaled)
        if trains and bias is not None:
            for_bias = (gradient.T @ share.to(weight.dtype)).squeeze(1).float() + (0 if for_bias is None else for_bias)
    if mean and not len(rows):
        loss.fill_(torch.nan)  # as PyTorch's
    for_weight, for_bias = (each if each is None else each.to(weight.dtype) for each in (for_weight, for_bias))
    return loss, (for_hidden, for_weight, for_bias)


@torch.library.custom_op("ort_zero::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignored: int,
    mean: bool,
    products: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of :func:`loss_and_gradients`, with an empty gradient for a bias that is None."""
    loss, (for_hidden, for_weight, for_bias) = loss_and_gradients(
        hidden, weight, bias, labels, ignored, mean, True, _products.get(products, IN_PYTORCH)
    )
    assert for_weight is not None, "the weight's gradient was asked for"
    return loss, for_hidden, for_weight, weight.new_empty(0) if for_bias is None else for_bias


@linear_cross_entropy.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(0 if bias is None else len(bias))


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    ctx.has_bias = inputs[2] is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _backward(context: Any, loss: torch.Tensor, *unused: Any) -> tuple:
    hidden, weight, bias = (loss.to(kept.dtype) * kept for kept in context.saved_tensors)
    return hidden, weight, bias if context.has_bias else None, None, None, None, None


linear_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)


def fuse_head_and_loss(module: GraphModule, products_of: ProductsOf, devices: Sequence[str]) -> None:
    """Compute linear layers and their cross entropies as one operator, where nothing else reads the logits.

    Args:
        products_of: returns the products for the sizes of a weight and a bias. The caller keeps them as long as the
            graph runs: without them PyTorch multiplies.
    """
    if not torch.is_grad_enabled():
        return
    graph = module.graph
    for node in [node for node in graph.nodes if node.target is F.cross_entropy]:
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        source, path = bound.arguments["input"], []
        while (source.op == "call_method" and source.target in _SAME_ROWS) or _is_slice_of_rows(source):
            path.append(source)
            source = source.args[0]
        if not _can_be_fused(bound.arguments, source, path, devices):
            continue
        hidden, weight, *rest = source.args
        bias = rest[0] if rest else None
        number = next(_numbers)
        _products[number] = products_of(_value(weight), None if bias is None else _value(bias))
        with graph.inserting_before(node):
            for each in filter(_is_slice_of_rows, reversed(path)):
                hidden = graph.call_function(operator.getitem, (hidden, each.args[1]))
            hidden = graph.call_method("reshape", (hidden, -1, _value(weight).shape[1]))
            labels, ignored = bound.arguments["target"], bound.arguments["ignore_index"]
            is_mean = bound.arguments["reduction"] == "mean"
            results = graph.call_function(
                torch.ops.ort_zero.linear_cross_entropy.default,
                (hidden, weight, bias, labels, ignored, is_mean, number),
            )
            loss = graph.call_function(operator.getitem, (results, 0))
            loss = graph.call_method("to", (loss, _value(node).dtype))
        node.replace_all_uses_with(loss)
        for each in (node, *path, source):
            graph.erase_node(each)
        module.recompile()


def _can_be_fused(loss: Mapping[str, Any], source: Node, path: Sequence[Node], devices: Sequence[str]) -> bool:
    """Return True if the operator computes this loss of these results of `source`, and nothing else reads them."""
    if source.target is not F.linear or source.kwargs or any(len(each.users) > 1 for each in (source, *path)):
        return False
    logits, labels = _value(loss["input"]), _value(loss["target"])
    return (
        logits.device.type in devices
        and logits.dim() == 2
        and logits.shape[1] == _value(source).shape[-1] >= LEAST_CLASSES
        and labels.dtype is torch.int64
        and len({_value(each).dtype for each in (source, *source.args) if isinstance(each, Node)}) == 1
        and _value(source).dtype in DTYPES
        and loss["reduction"] in ("mean", "sum")
        and not (loss["weight"] or loss["label_smoothing"] or loss["size_average"] or loss["reduce"])
    )


def _value(node: Node) -> torch.Tensor:
    return node.meta["example_value"]


def _is_slice_of_rows(node: Node) -> bool:
    """Return True for a slice of all dimensions but the last one: ``x[..., :-1, :]``."""
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    index = node.args[1]
    return len(index) > 1 and index[-1] == slice(None) and all(isinstance(i, slice) or i is Ellipsis for i in index)
