"""Bound DeepSpeed's buckets by what glibc keeps, so that the system does not fill their pages anew in each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ort_zero.compat.deepspeed import parameter_offload_of
from ort_zero.compat.deepspeed_parameters import elements_of
from ort_zero.compat.deepspeed_units import PREFETCH_BUCKET
from ort_zero.compat.glibc import LARGEST_KEPT
from ort_zero.compat.torch_distributed import require_equal

_REDUCE_BUCKET = "reduce_bucket_size"


def bound_buckets(engine: Any) -> None:
    """Have DeepSpeed reduce and prefetch no more elements at once than fit into memory that glibc keeps.

    Does nothing for what is smaller in the user's config, and nothing on a GPU. A larger parameter or module is still
    reduced or gathered as a whole. A prefetch ends after the parameter that exceeds its bound, so it gets one half.
    """
    model = engine.module
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    itemsize = max((parameter.element_size() for parameter in model.parameters()), default=torch.float32.itemsize)
    elements = LARGEST_KEPT // itemsize
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    for holder, name, bound in (
        (engine.optimizer, _REDUCE_BUCKET, elements),
        (coordinator, PREFETCH_BUCKET, elements // 2),
    ):
        if hasattr(holder, name):
            setattr(holder, name, min(getattr(holder, name), bound))


def require_equal_sizes(engine: Any, units: Iterable[nn.Module]) -> None:
    """Raise RankError on all data-parallel ranks, which must all call, if their units or bucket sizes differ.

    Units decide what is gathered at once and the order of gradients, buckets how much is reduced or prefetched at once.
    Both come from the model and the config of each rank.
    """
    names = {id(module): name for name, module in engine.module.named_modules()}
    sizes = {f"the number of elements of unit {names.get(id(unit), '?')}": elements_of(unit) for unit in units}
    sizes[_REDUCE_BUCKET] = getattr(engine.optimizer, _REDUCE_BUCKET, 0)
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    sizes["the size of a prefetch"] = getattr(coordinator, PREFETCH_BUCKET, 0)
    require_equal("training with ort_zero", sizes, engine.seq_data_parallel_group, always=True)
