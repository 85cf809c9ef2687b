"""Find the functions that gather parameters and reduce gradients in DeepSpeed, for ``ort-zero profile``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

_STAGES = "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"
_OPTIMIZERS = f"{_STAGES[0]}:DeepSpeedZeroOptimizer", f"{_STAGES[1]}:DeepSpeedZeroOptimizer_Stage3"
_REDUCES = (
    "reduce_ready_partitions_and_remove_grads", "process_gradients", "reduce_gradients",
    "overlapping_partition_gradients_reduce_epilogue", "independent_gradient_partition_epilogue",
)  # fmt: skip
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_GATHERS = (f"{_COORDINATOR}.fetch_sub_module", f"{_STAGES[0]}:all_gather_dp_groups", f"{_OPTIMIZERS[1]}._post_step")


def gathers() -> Iterator[tuple[Any, str]]:
    """Yield the functions that gather parameters in the installed DeepSpeed: class or module, and name in it."""
    yield from _existing(_GATHERS)


def reduces() -> Iterator[tuple[Any, str]]:
    """Yield the functions that reduce gradients in the installed DeepSpeed: class or module, and name in it."""
    yield from _existing(f"{optimizer}.{name}" for optimizer in _OPTIMIZERS for name in _REDUCES)
    yield from _existing(["deepspeed.runtime.engine:DeepSpeedEngine.allreduce_gradients"])


def _existing(targets: Any) -> Iterator[tuple[Any, str]]:
    for target in targets:
        module_name, _, path = target.partition(":")
        holder: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            holder = getattr(holder, parent, None)
        if holder is not None and name in vars(holder):
            yield holder, name
