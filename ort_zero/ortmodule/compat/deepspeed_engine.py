"""What a graph under ZeRO takes from a DeepSpeed engine: limits, groups, leaf modules. Version 0.19."""

from __future__ import annotations

import sys
import weakref
from typing import Any

_REDUCE_LEAF = "_ort_zero_reduce_leaf"


def plain_linear() -> Any:
    """Return ``torch.nn.functional.linear`` as it was before ``zero.Init`` replaced it, or None if it did not."""
    partition_parameters = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partition_parameters is None:
        return None
    return getattr(partition_parameters.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)


def set_in_forward(module: Any, value: bool) -> bool | None:
    """Set DeepSpeed's "this module is in its forward" mark; return the old value, None if it carries none."""
    table = module._parameters
    if not hasattr(table, "_in_forward"):
        return None
    old, table._in_forward = table._in_forward, value
    return old


def partition_group_of(offload: Any) -> Any:
    """Return the process group over which ZeRO-3 partitions the parameters."""
    return offload.dp_process_group


def prefetch_window(offload: Any) -> int:
    """Return how many elements ZeRO-3 may gather ahead of their use, ``stage3_prefetch_bucket_size``."""
    return int(offload._prefetch_bucket_sz)


def limits_of_kept_weights(offload: Any) -> tuple[int, int]:
    """Return within how many gathered elements a weight has to be used again to stay whole, and how many may stay.

    These are ``stage3_max_reuse_distance`` and ``stage3_max_live_parameters``. Nothing stays where weights lie on NVMe:
    a weight that is whole holds one of the few buffers through which they are read.
    """
    if str(getattr(offload, "offload_device", None)).endswith("nvme"):
        return 0, 0
    return int(offload._max_reuse_distance_in_numel), int(offload._max_available_parameters_in_numel)


def connect_leaf_gradients(engine: Any) -> None:
    """Prepare the parameters inside of leaf modules for :func:`reduce_leaf_gradient`.

    DeepSpeed puts no hook on them: a backward hook of the leaf module reduces them together. Where ORT runs the graph,
    that module does not run, and nor does its hook.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    leaves = getattr(optimizer, "leaf_parameters", None) or {}
    for parameters in leaves.values():
        for parameter in parameters:
            # weakly: the module may outlive the engine
            setattr(parameter, _REDUCE_LEAF, weakref.WeakMethod(optimizer.reduce_ready_partitions_and_remove_grads))


def reduce_leaf_gradient(parameter: Any) -> None:
    """Hand the gradient of a leaf module's parameter to DeepSpeed's reduction; does nothing for any other parameter."""
    reference = getattr(parameter, _REDUCE_LEAF, None)
    reduce = None if reference is None else reference()
    if reduce is not None:
        reduce(parameter)


def has_own_hooks_alone(parameter: Any) -> bool:
    """Return True if no Python hook but DeepSpeed's sees the parameter's gradient."""
    hooks = parameter._post_accumulate_grad_hooks
    return not parameter._backward_hooks and all(
        getattr(hook, "__module__", "").startswith("deepspeed.") for hook in (hooks or {}).values()
    )
