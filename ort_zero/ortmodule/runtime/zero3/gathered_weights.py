"""Finds the parameter behind a gathered weight that ORT holds, so that its memory need not be held for the backward.

Nodes that run in PyTorch inside the graph save what they read. A gathered weight among that is remembered by its
parameter instead, and gathered again when the backward of the node comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MOST = 4096
"""Number of remembered weights above which those that ORT has let go of are forgotten."""

Gather = Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
"""Gathers parameters and returns their full weights; all ranks must call it."""


@dataclass(frozen=True, slots=True)
class GatheredWeight:
    """A gathered weight that ORT holds."""

    gather: weakref.WeakMethod
    """The method that gathers the weight again, see :data:`Gather`."""
    parameter: weakref.ref
    storage: StorageWeakRef
    sample: tuple

    def gone(self) -> bool:
        """Return True if ORT has let go of it, so that its memory may be somebody else's."""
        return self.storage.expired()

    def again(self, weights: Sequence[GatheredWeight]) -> tuple[torch.Tensor, ...]:
        """Return the full `weights` once more. All ranks must call this."""
        gather = self.gather()
        if gather is None:
            raise RuntimeError("the graph that gathered these weights is gone")
        return gather([weight.parameter() for weight in weights])


_weights: dict[int, GatheredWeight] = {}
"""The remembered weights by the address of their first element: the weights of one collective share a storage."""


def remember(weight: torch.Tensor, parameter: Any, gather: Gather) -> None:
    """Let :func:`weight_at` find that `weight` is the gathered `parameter`.

    Args:
        weight: as it is given to ORT.
        parameter: a parameter of the model; only referred to weakly.
        gather: a bound method, whose object is referred to weakly too.
    """
    if len(_weights) > _MOST:
        for address in [address for address, known in _weights.items() if known.gone()]:
            del _weights[address]
    storage = StorageWeakRef(weight.untyped_storage())
    _weights[weight.data_ptr()] = GatheredWeight(
        weakref.WeakMethod(gather), weakref.ref(parameter), storage, _sample(weight)
    )


def weight_at(tensor: torch.Tensor) -> GatheredWeight | None:
    """Return the gathered weight that `tensor` is; None for anything else that ORT has put in its place."""
    found = _weights.get(tensor.data_ptr())
    return None if found is None or found.gone() or found.sample != _sample(tensor) else found


def _sample(tensor: torch.Tensor) -> tuple:
    """Return size and some elements: ORT computes in place where it can."""
    flat = tensor.detach().reshape(-1)
    return (flat.numel(), *flat[:: max(1, flat.numel() // 16)].tolist())
