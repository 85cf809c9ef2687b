"""Write calls that the exporter or ONNX Runtime treats wrongly by others; one table, applied to each graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ort_zero.ortmodule.graphs.values import value_of


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    drawn: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``scaled_dot_product_attention`` by products and a softmax, as PyTorch does where it has no kernel.

    A query that no key is visible to has the result 0, as in PyTorch.

    Args:
        query: [..., heads, length, width]; the others as ``scaled_dot_product_attention`` takes them.
        key: [..., heads, keys, width].
        value: [..., heads, keys, width of the result].
        attn_mask: of bool, or added to the scores.
        dropout_p: ignored, see `drawn`.
        is_causal: hide later keys.
        scale: factor of the scores.
        enable_gqa: several heads of `query` share one head of `key` and `value`.
        drawn: [..., heads, length, keys], the dropout of ones.
    """
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(each, query.shape[-3] // key.shape[-3]) for each in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    lowest = torch.finfo(query.dtype).min
    if is_causal:
        later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        scores = scores + torch.zeros_like(later, dtype=query.dtype).masked_fill(later, lowest)
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        is_bool = attn_mask.dtype is torch.bool
        hidden = ~attn_mask if is_bool else attn_mask == -torch.inf
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if is_bool else attn_mask
        weights = torch.softmax(scores + bias.masked_fill(hidden, lowest), -1)
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (weights if drawn is None else weights * drawn) @ value


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Return each head of [..., heads, length, width] several times in a row."""
    *outer, count, length, width = heads.shape
    return heads.unsqueeze(-3).expand(*outer, count, times, length, width).reshape(*outer, count * times, length, width)


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute ``batch_norm`` with running statistics, or with the batch's own where there are none."""
    if training and running_mean is not None:  # changes its arguments, which is refused
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    shape = [1, -1, *([1] * (input.dim() - 2))]
    if training or running_mean is None or running_var is None:
        axes = [0, *range(2, input.dim())]
        mean = input.mean(axes, keepdim=True)
        variance = (input - mean).square().mean(axes, keepdim=True)
    else:
        mean, variance = running_mean.reshape(shape), running_var.reshape(shape)
    normal = (input - mean) * torch.rsqrt(variance + eps)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _hardtanh(input: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> torch.Tensor:
    """Compute ``hardtanh``, with PyTorch's gradient of 0 at the limits and for NaN."""
    if inplace:  # refused, since others may read the tensor
        return F.hardtanh(input, min_val, max_val, inplace)
    inside = input.masked_fill(input <= min_val, min_val).masked_fill(input >= max_val, max_val)
    return inside.masked_fill(input.isnan(), torch.nan)


def _relu6(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return _hardtanh(input, 0.0, 6.0, inplace)


def _pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    """Compute ``pairwise_distance`` with its `eps`, which the exporter leaves out."""
    distance = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim=True)
    return distance if keepdim else distance.squeeze(-1)


REWRITES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.batch_norm: _batch_norm,
    F.hardtanh: _hardtanh,
    F.relu6: _relu6,
    F.pairwise_distance: _pairwise_distance,
}
"""Function in a graph of Dynamo to the function that takes its place."""


def apply(graph: fx.Graph) -> None:
    """Replace the calls of a graph that are in :data:`REWRITES`, and products of flattened rows."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in REWRITES:
            node.target = REWRITES[node.target]
    for node in graph.find_nodes(op="call_function", target=torch.addmm):
        _multiply_rows(graph, node)


def _multiply_rows(graph: fx.Graph, node: Any) -> None:
    """Write an ``addmm`` of flattened rows, as in the layers of GPT-2, as a product of the rows where they lie.

    Upstream's memory optimizer knows a GELU between products, and none between changes of shape.
    """
    if len(node.args) != 3 or node.kwargs or not _is_view(node.args[1]):
        return
    bias, flat, weight = node.args
    rows, back = flat.args[0], list(node.users)
    wanted = [*map(str, value_of(rows).shape[:-1]), str(value_of(node).shape[-1])]
    is_undone = all(_is_view(user) and [*map(str, value_of(user).shape)] == wanted for user in back)
    if str(value_of(rows).shape[-1]) != str(value_of(flat).shape[-1]) or not is_undone:
        return
    with graph.inserting_before(node):
        result = graph.call_function(torch.add, (graph.call_function(torch.matmul, (rows, weight)), bias))
    for user in back:
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)


def _is_view(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in ("view", "reshape")
