"""Names of DeepSpeed that are not public, in one place. Version 0.19."""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

from ort_zero.errors import PatchError
from ort_zero.utils.patching import defined_in

ENGINE = "deepspeed.runtime.engine"
ENGINE_INIT = f"{ENGINE}:DeepSpeedEngine.__init__"
ZERO_TO_FP32 = "deepspeed.utils.zero_to_fp32"
READ_FP32_STATE = f"{ZERO_TO_FP32}:_get_fp32_state_dict_from_zero_checkpoint"
"""Reads one checkpoint for all functions of that module; they were imported by name before we come."""
FIND_OPTIMIZER_FILES = f"{ZERO_TO_FP32}:get_optim_files"
FIND_MODEL_FILE = f"{ZERO_TO_FP32}:get_model_state_file"
"""Find DeepSpeed's files in the folder of one checkpoint, for Lightning too, which loads them itself."""
_REDUCE_LEAF = "_ort_zero_reduce_leaf"


def plain_linear() -> Any:
    """Return ``torch.nn.functional.linear`` as it was before ``zero.Init`` replaced it, or None if it did not."""
    partition_parameters = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partition_parameters is None:
        return None
    return getattr(partition_parameters.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)


def require_fp32_reader(original: Any) -> None:
    """Raise PatchError unless :data:`READ_FP32_STATE` takes the folder of one checkpoint, and what to leave out."""
    defined_in(ZERO_TO_FP32)(original)
    if list(inspect.signature(original).parameters) != ["ds_checkpoint_dir", "exclude_frozen_parameters"]:
        raise PatchError(f"{READ_FP32_STATE} takes {inspect.signature(original)}, which is not known")


def reads_stored_weights() -> bool:
    """Return whether the functions around :data:`READ_FP32_STATE` take what is still in files: 0.16 does, 0.14 not."""
    return hasattr(sys.modules[ZERO_TO_FP32], "to_torch_tensor")


def require_file_finder(original: Any) -> None:
    """Raise PatchError unless a function that finds files takes the folder of a checkpoint first."""
    defined_in(ZERO_TO_FP32)(original)
    if list(inspect.signature(original).parameters) not in (["checkpoint_dir"], ["checkpoint_dir", "zero_stage"]):
        raise PatchError(
            f"{original.__name__} of {ZERO_TO_FP32} takes {inspect.signature(original)}, which is not known"
        )


def set_in_forward(module: Any, value: bool) -> bool | None:
    """Set DeepSpeed's "this module is in its forward" mark; return the old value, None if it carries none."""
    table = module._parameters
    if not hasattr(table, "_in_forward"):
        return None
    old, table._in_forward = table._in_forward, value
    return old


def config_of(init: Any, self: Any, args: tuple, kwargs: dict) -> tuple[inspect.BoundArguments, dict]:
    """Return the bound arguments of an engine's ``__init__`` and the config as the dict that DeepSpeed uses.

    Args:
        init: the original ``DeepSpeedEngine.__init__``.
    """
    bound = inspect.signature(init).bind(self, *args, **kwargs)
    config = bound.arguments.get("config")
    if not isinstance(config, dict):
        config_class = bound.arguments.get("config_class")
        config = getattr(config_class, "_param_dict", None) or {}
    return bound, config


def parameter_offload_of(engine: Any) -> Any:
    """Return the engine's DeepSpeedZeRoOffload, or None below ZeRO-3."""
    optimizer = getattr(engine, "optimizer", None)
    return getattr(optimizer, "parameter_offload", None) or (
        optimizer if type(optimizer).__name__ == "DeepSpeedZeRoOffload" else None
    )


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


def held_part(parameter: Any) -> tuple[Any, int, int, bool]:
    """Return what this rank holds of a parameter: the elements, flat index of the first, elements of the whole.

    The last value is True if other ranks hold the rest. Under ZeRO-3 the padding of the last part is left out; what is
    on NVMe at the moment is not read.
    """
    if not hasattr(parameter, "ds_id") or parameter.data.numel() == parameter.ds_numel:
        return parameter.detach(), 0, parameter.numel(), False
    import torch.distributed as dist

    shard, total = parameter.ds_tensor, int(parameter.ds_numel)
    offset = dist.get_rank(parameter.ds_process_group) * int(shard.ds_numel)
    here = max(0, min(int(shard.ds_numel), total - offset))
    held = shard.detach().view(-1)
    return held[: min(here, held.numel())], min(offset, total), total, True


def loads_universal_checkpoints(engine: Any) -> bool:
    """Return True if the engine's config says that what is loaded is universal, which DeepSpeed alone does."""
    asked = getattr(engine, "load_universal_checkpoint", None)
    return asked is not None and bool(asked())


def world_size_and_stage(engine: Any) -> tuple[int, int]:
    """Return over how many ranks the engine is data-parallel, and its ZeRO stage."""
    return int(engine.seq_dp_world_size), int(engine.zero_optimization_stage())
