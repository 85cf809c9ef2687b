"""Tells whether a call is made by one of ``torch.func``'s transforms, through names that are not public."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def in_transform() -> bool:
    """Return whether ``vmap``, ``grad``, ``jvp`` or another transform of ``torch.func`` runs at the moment."""
    return torch._C._functorch.maybe_current_level() is not None


def are_replaced(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors that were computed stand in place of parameters, as of ``functional_call``."""
    return any(not isinstance(p, torch.nn.Parameter) or not p.is_leaf for p in parameters)
