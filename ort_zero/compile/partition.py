"""Choose what AOTAutograd decomposes, and what a forward keeps for its backward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from ort_zero.compat.torch_compile import (
    core_aten_decompositions,
    min_cut_rematerialization_partition,
    partitioner_options,
    tree_leaves,
)
from ort_zero.compile.conversion.creation import CONSTANTS
from ort_zero.compile.conversion.views import VIEWS
from ort_zero.compile.plan import is_ordered
from ort_zero.runtimes import observing
from ort_zero.runtimes.memory_order import hint

aten = torch.ops.aten
_WHOLE = frozenset(
    "_log_softmax _log_softmax_backward_data _native_batch_norm_legit_functional "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward _softmax "
    "_softmax_backward_data binary_cross_entropy binary_cross_entropy_backward elu_backward embedding_dense_backward "
    "gelu gelu_backward glu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh_backward "
    "huber_loss huber_loss_backward index_add index_copy index_fill leaky_relu_backward linspace log_sigmoid_backward "
    "log_sigmoid_forward mish mish_backward mse_loss mse_loss_backward native_batch_norm native_batch_norm_backward "
    "native_dropout native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm "
    "native_layer_norm_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward "
    "select_backward sigmoid_backward silu silu_backward slice_backward smooth_l1_loss smooth_l1_loss_backward "
    "softplus softplus_backward std std_mean tanh_backward threshold_backward upsample_bilinear2d "
    "upsample_nearest2d".split()
)
"""Operators that one of the two runtimes has as one kernel: they are not decomposed. (torch 2.13 decomposes linspace of
integers into other numbers, and ``index_add`` and its like into calls that take negative indices.)"""

_COMPARISONS = frozenset(getattr(aten, name).Tensor for name in ("eq", "ne", "ge", "gt", "le", "lt"))
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's core decompositions, except for operators that stay whole."""
    return {
        target: function
        for target, function in core_aten_decompositions().items()
        if getattr(target, "overloadpacket", target).__name__ not in _WHOLE
    }


def partition(
    joint: GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    fraction: float = 1.0,
    keeps_all: bool = True,
    **rest: Any,
) -> tuple[GraphModule, GraphModule]:
    """Divide a joint graph into forward and backward.

    Torch's min-cut chooses the smallest set of values to keep. A view of a parameter is never kept: the parameter
    itself is, so that ZeRO-3 can release its memory. Regions of activation checkpointing keep the user's choice.

    Args:
        fraction: what is kept, above 0 and up to 1. Near 0 it is the inputs and random numbers; with 1 the backward
            computes nothing again but views and constants, as in eager PyTorch, if it `keeps_all`.
        keeps_all: False computes again what costs less than to keep it, as Inductor does within its loops.
    """
    for passes in observing.passes:
        passes.remove_pass_throughs(joint.graph)
    _keep_what_is_compared(joint, num_fwd_outputs)
    for node in joint.graph.nodes:
        # drawn a second time, random numbers would differ
        must_stay = is_ordered(node) if fraction < 1 or not keeps_all else not _is_free(node)
        if node.op == "call_function" and "recompute" not in node.meta and must_stay:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with partitioner_options(fraction, _has_equal_calls(joint)):
        divided = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
    for passes in observing.passes:
        passes.erase_from_backward(divided[1].graph)
    return divided


def kept_by(forward: GraphModule, num_fwd_outputs: int) -> dict[torch.fx.Node, int]:
    """Return the bytes that a forward graph keeps for its backward, without the graph's inputs, by the kept node.

    Of nodes that share a storage, the first counts.
    """
    (results,) = forward.graph.find_nodes(op="output")[0].args
    seen = {storage for node in forward.graph.find_nodes(op="placeholder") if (storage := _storage_of(node))}
    kept = {}
    for node in results[num_fwd_outputs:]:
        storage = _storage_of(node)
        if storage is not None and storage not in seen:
            seen.add(storage)
            kept[node] = hint(node.meta["val"].untyped_storage().nbytes())
    return kept


def _storage_of(node: Any) -> StorageWeakRef | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def computed_again(forward: GraphModule, backward: GraphModule) -> list[torch.fx.Node]:
    """Return the calls of a forward that its backward makes a second time; views and constants cost nothing."""
    calls = {node.name for node in forward.graph.nodes if node.op == "call_function" and not _is_free(node)}
    return [node for node in backward.graph.nodes if node.op == "call_function" and node.name in calls]


def _has_equal_calls(joint: GraphModule) -> bool:
    """Return True if a graph has two calls of an operator with the same arguments, views and constants not counted."""
    calls = [
        (node.target, str(node.args), str(node.kwargs))
        for node in joint.graph.nodes
        if node.op == "call_function" and (not _is_free(node) or isinstance(node.meta.get("val"), tuple))
    ]
    return len(set(calls)) < len(calls)


def _keep_what_is_compared(joint: GraphModule, num_fwd_outputs: int) -> None:
    """Keep what both sides of comparisons of float tensors are made of, unless all of it is computed again.

    The gradient of ``amax`` looks for the elements that equal the largest: computed again by another kernel, none does.
    """
    forward = _ancestors(tree_leaves(joint.graph.find_nodes(op="output")[0].args)[:num_fwd_outputs])
    kernels = {node for node in forward if node.op == "call_function" and node.target not in VIEWS}
    for node in joint.graph.nodes:
        if node.target in _COMPARISONS and all(side.meta["val"].is_floating_point() for side in node.args):
            sources = _ancestors(node.args, stop=kernels.__contains__) & kernels
            if not all(source.meta.get("recompute") in _AGAIN for source in sources):
                for source in sources:
                    source.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _ancestors(nodes: Iterable[Any], stop: Callable[[torch.fx.Node], bool] = lambda node: False) -> set[torch.fx.Node]:
    """Return the nodes and what they are computed from, back to inputs or to where `stop` is true."""
    waiting, seen = [node for node in nodes if isinstance(node, torch.fx.Node)], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += () if stop(node) else node.all_input_nodes
    return seen


def _is_free(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem or node.target in VIEWS or node.target in CONSTANTS:
        return True
    return not isinstance(node.meta.get("val"), torch.Tensor)
