"""Reach the private parts of DeepSpeed 0.19: engines, ZeRO-3's partitioned parameters, gathers and reductions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ort_zero.compat.torch_modules import parameters_of
from ort_zero.errors import PatchError
from ort_zero.utils.patching import defined_in

ENGINE = "deepspeed.runtime.engine"
CONFIG = "deepspeed.runtime.config"
ZERO_TO_FP32 = "deepspeed.utils.zero_to_fp32"
READ_FP32_STATE = f"{ZERO_TO_FP32}:_get_fp32_state_dict_from_zero_checkpoint"
"""The function that reads one checkpoint for all functions of its module, which users may have imported already."""
FIND_OPTIMIZER_FILES = f"{ZERO_TO_FP32}:get_optim_files"
FIND_MODEL_FILE = f"{ZERO_TO_FP32}:get_model_state_file"
"""The functions that find DeepSpeed's files in the folder of one checkpoint; Lightning calls these, too."""
_STAGES = "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"
_OPTIMIZERS = f"{_STAGES[0]}:DeepSpeedZeroOptimizer", f"{_STAGES[1]}:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
GATHERS = (f"{_COORDINATOR}.fetch_sub_module", f"{_STAGES[0]}:all_gather_dp_groups", f"{_OPTIMIZERS[1]}._post_step")
"""Names of the functions that gather parameters, of all supported versions of DeepSpeed; see :func:`existing`."""
REDUCES = (
    *(f"{optimizer}.{name}" for optimizer in _OPTIMIZERS for name in (
        "reduce_ready_partitions_and_remove_grads", "process_gradients", "reduce_gradients",
        "overlapping_partition_gradients_reduce_epilogue", "independent_gradient_partition_epilogue",
    )),
    f"{ENGINE}:DeepSpeedEngine.allreduce_gradients",
)  # fmt: skip
"""Names of the functions that reduce gradients, likewise."""


def takes(*arguments: str) -> Callable[[Any], None]:
    """Return a guard that raises PatchError for a function of :data:`ZERO_TO_FP32` with other arguments."""

    def guard(original: Any) -> None:
        defined_in(ZERO_TO_FP32)(original)
        signature = inspect.signature(original)
        if tuple(signature.parameters) != arguments:
            raise PatchError(f"{original.__name__} of {ZERO_TO_FP32} takes the unknown arguments {signature}")

    return guard


def config_of(init: Any, self: Any, args: tuple, kwargs: dict) -> tuple[inspect.BoundArguments, dict]:
    """Return the bound arguments of an engine's ``__init__``, and the config dict that DeepSpeed uses."""
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
    """Return a parameter's elements here, the first one's flat index, the whole's size, and whether others have a rest.

    Padding of ZeRO-3, and a part that is on NVMe at the moment, are left out.
    """
    if not hasattr(parameter, "ds_id") or parameter.data.numel() == parameter.ds_numel:
        return parameter.detach(), 0, parameter.numel(), False
    import torch.distributed as dist

    shard, total = parameter.ds_tensor, int(parameter.ds_numel)
    offset = dist.get_rank(parameter.ds_process_group) * int(shard.ds_numel)
    here = max(0, min(int(shard.ds_numel), total - offset))
    elements = shard.detach().view(-1)
    return elements[: min(here, elements.numel())], min(offset, total), total, True


def config_dict(engine: Any) -> dict[str, Any]:
    """Return the config of an engine as the user gave it."""
    return getattr(engine._config, "_param_dict", None) or {}


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(parameter.ds_shape) if hasattr(parameter, "ds_id") else tuple(parameter.shape)


def full_size(parameter: Any) -> int:
    """Return the number of elements of the whole parameter."""
    return int(parameter.ds_numel) if hasattr(parameter, "ds_id") else parameter.numel()


def elements_of(module: Any) -> int:
    """Return the number of elements of all parameters below a module; a partitioned parameter counts whole."""
    return sum(map(full_size, parameters_of(module)))


def number_of(parameter: Any) -> int | None:
    """Return the number by which DeepSpeed's messages name a partitioned parameter, None for any other."""
    return getattr(parameter, "ds_id", None)


def micro_steps_since_step(engine: Any) -> int:
    """Return the number of micro-steps since the optimizer's last step; 0 if the program sets the boundaries."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # since 0.19
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None or (managed and not managed()):
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()


def drop_accumulated_gradients(engine: Any) -> None:
    """Drop the accumulated gradients: the next micro-step is the first one of a step."""
    optimizer = engine.optimizer
    if optimizer is not None:
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            gradients = getattr(optimizer, name, None)
            if isinstance(gradients, dict):
                gradients.update(dict.fromkeys(gradients))
        if hasattr(optimizer, "bit16_groups") and hasattr(optimizer, "micro_step_id"):
            optimizer.micro_step_id = -1  # ZeRO-3's zero_grad() does the same
    engine.micro_steps = 0


def existing(targets: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Yield class or module, and name in it, of those functions that the installed DeepSpeed has."""
    for target in targets:
        module_name, _, path = target.partition(":")
        holder: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            holder = getattr(holder, parent, None)
        if holder is not None and name in vars(holder):
            yield holder, name
