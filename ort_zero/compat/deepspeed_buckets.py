"""Keep the buckets of gradients of ZeRO-1 and 2 between steps, so that the system does not fill their pages anew."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ort_zero.compat.glibc import KEPT
from ort_zero.compat.torch_modules import is_shared

_SET_UP = "setup_buckets"


def keep_buckets(optimizer: Any) -> None:
    """Have DeepSpeed's ZeRO-1 or 2 optimizer reuse its gradient buckets (``ipg_buckets``) in each backward on CPUs.

    DeepSpeed allocates them for each backward, with ``reduce_bucket_size`` elements. Gradients that fill more than
    1 GiB go back to the system, as without this function. ZeRO-3 keeps its bucket itself.
    """
    if hasattr(type(optimizer), _SET_UP):
        setattr(optimizer, _SET_UP, _Buckets(optimizer).set_up)


class _Buckets:
    """Buckets of gradients that an optimizer has filled in its last backward, kept for the next one."""

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._kept: dict[torch.dtype, list[torch.Tensor]] = {}
        gradients = sum(parameter.numel() for group in optimizer.bit16_groups for parameter in group)
        self._elements = min(int(optimizer.reduce_bucket_size), gradients)

    def set_up(self) -> None:
        """Set up the buckets at the first gradient of a backward; replace a bucket whose memory a tensor still uses."""
        optimizer: Any = self._optimizer()
        if optimizer.ready_for_gradients:
            return
        getattr(type(optimizer), _SET_UP)(optimizer)
        for dtype, bucket in optimizer.ipg_buckets.items():
            kept = self._kept.pop(dtype, [])
            if not any(map(is_shared, kept)) and list(map(_kind, kept)) == list(map(_kind, bucket.buffer)):
                bucket.buffer[:] = kept
            if all(each.device.type == "cpu" and self._elements * each.itemsize <= KEPT for each in bucket.buffer):
                self._kept[dtype] = list(bucket.buffer)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
