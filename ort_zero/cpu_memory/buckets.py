"""Bound DeepSpeed's buckets by what glibc keeps, so that the system does not fill their pages anew in each step."""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.compat.deepspeed import parameter_offload_of
from ort_zero.compat.deepspeed_units import PREFETCH_BUCKET, REDUCE_BUCKET
from ort_zero.cpu_memory.glibc import LARGEST_KEPT


def bound_buckets(engine: Any) -> bool:
    """Have DeepSpeed reduce and prefetch no more elements at once than fit into memory that glibc keeps.

    Return True if the engine has such a bucket.

    Does nothing for what is smaller in the user's config, and nothing on a GPU. A larger parameter or module is still
    reduced or gathered as a whole. A prefetch ends after the parameter that exceeds its bound, so it gets one half.
    """
    model = engine.module
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    itemsize = max((parameter.element_size() for parameter in model.parameters()), default=torch.float32.itemsize)
    elements = LARGEST_KEPT // itemsize
    coordinator = getattr(parameter_offload_of(engine), "param_coordinator", None)
    bounds = ((engine.optimizer, REDUCE_BUCKET, elements), (coordinator, PREFETCH_BUCKET, elements // 2))
    existing = [each for each in bounds if hasattr(*each[:2])]
    for holder, name, bound in existing:
        setattr(holder, name, min(getattr(holder, name), bound))
    return bool(existing)
