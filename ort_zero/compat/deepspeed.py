"""Read private names of DeepSpeed 0.19 that several modules need."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from ort_zero.errors import PatchError
from ort_zero.utils.patching import defined_in

ENGINE = "deepspeed.runtime.engine"
ENGINE_INIT = f"{ENGINE}:DeepSpeedEngine.__init__"
ZERO_TO_FP32 = "deepspeed.utils.zero_to_fp32"
READ_FP32_STATE = f"{ZERO_TO_FP32}:_get_fp32_state_dict_from_zero_checkpoint"
"""The function that reads one checkpoint for all functions of its module, which users may have imported already."""
FIND_OPTIMIZER_FILES = f"{ZERO_TO_FP32}:get_optim_files"
FIND_MODEL_FILE = f"{ZERO_TO_FP32}:get_model_state_file"
"""The functions that find DeepSpeed's files in the folder of one checkpoint; Lightning calls these, too."""


def require_fp32_reader(original: Any) -> None:
    """Raise PatchError unless :data:`READ_FP32_STATE` takes a checkpoint's folder and ``exclude_frozen_parameters``."""
    defined_in(ZERO_TO_FP32)(original)
    if list(inspect.signature(original).parameters) != ["ds_checkpoint_dir", "exclude_frozen_parameters"]:
        raise PatchError(f"{READ_FP32_STATE} takes the unknown arguments {inspect.signature(original)}")


def require_file_finder(original: Any) -> None:
    """Raise PatchError unless a function that finds files takes the folder of a checkpoint as its first argument."""
    defined_in(ZERO_TO_FP32)(original)
    if list(inspect.signature(original).parameters) not in (["checkpoint_dir"], ["checkpoint_dir", "zero_stage"]):
        raise PatchError(
            f"{original.__name__} of {ZERO_TO_FP32} takes the unknown arguments {inspect.signature(original)}"
        )


def config_of(init: Any, self: Any, args: tuple, kwargs: dict) -> tuple[inspect.BoundArguments, dict]:
    """Return the bound arguments of an engine's ``__init__``, and the config dict that DeepSpeed uses.

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


def local_part(parameter: Any) -> tuple[Any, int, int, bool]:
    """Return this rank's part of a parameter: elements, flat index of the first element, size of the whole.

    The last value is True if other ranks have the rest. Under ZeRO-3 the padding of the last part is left out. A part
    that is on NVMe at the moment is not read.
    """
    if not hasattr(parameter, "ds_id") or parameter.data.numel() == parameter.ds_numel:
        return parameter.detach(), 0, parameter.numel(), False
    import torch.distributed as dist

    shard, total = parameter.ds_tensor, int(parameter.ds_numel)
    offset = dist.get_rank(parameter.ds_process_group) * int(shard.ds_numel)
    here = max(0, min(int(shard.ds_numel), total - offset))
    elements = shard.detach().view(-1)
    return elements[: min(here, elements.numel())], min(offset, total), total, True


def loads_universal_checkpoints(engine: Any) -> bool:
    """Return True if the engine's config asks for a universal checkpoint, which only DeepSpeed's loader can load."""
    asked = getattr(engine, "load_universal_checkpoint", None)
    return asked is not None and bool(asked())


def has_masters_without_zero(engine: Any) -> bool:
    """Return True for bf16 or fp16 without ZeRO, where DeepSpeed's own optimizer keeps all masters on each rank."""
    from torch.optim import Optimizer

    return not int(engine.zero_optimization_stage()) and not isinstance(engine.optimizer, (Optimizer, type(None)))


def world_size_and_stage(engine: Any) -> tuple[int, int]:
    """Return the number of data-parallel ranks of the engine, and its ZeRO stage."""
    return int(engine.seq_dp_world_size), int(engine.zero_optimization_stage())


def flops_are_counted(engine: Any) -> Callable[[], bool]:
    """Return a function that returns True in the step whose operations DeepSpeed's flops profiler counts on rank 0.

    The function returns the same on all ranks. It does not keep the engine alive.
    """
    reference = weakref.ref(engine)

    def is_counted() -> bool:
        live = reference()
        return (
            live is not None
            and live.flops_profiler_enabled()
            and live.global_steps == live.flops_profiler_profile_step()
        )

    return is_counted
