"""What torch's DistributedDataParallel knows and asks, through names that are not public."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ort_zero.utils.patching import Patch, defined_in

_DDP = "torch.nn.parallel.distributed"


def is_ddp(module: Any) -> bool:
    """Return whether `module` is a DistributedDataParallel."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def in_forward() -> bool:
    """Return True while a DistributedDataParallel module runs its forward."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def patches(reduced_behind: Callable[[Iterable[Any]], list[Any]]) -> tuple[Patch, ...]:
    """Return the patch that shows DDP parameters which autograd's graph does not lead to.

    Args:
        reduced_behind: returns the parameters that get a gradient when a backward runs through nodes of autograd's
            graph, although the graph does not lead to them.
    """

    def shown(original):
        @functools.wraps(original)
        def _find_tensors(obj):
            found = original(obj)
            if not isinstance(obj, torch.Tensor) or obj.grad_fn is None:
                return found
            # a parameter itself is no result of anything, and DDP starts at what made the results
            return [*found, *(parameter.view_as(parameter) for parameter in reduced_behind([obj.grad_fn]))]

        return _find_tensors

    return (
        Patch(
            target=f"{_DDP}:_find_tensors",
            build=shown,
            why="find_unused_parameters sees what a graph reduces by itself",
            guard=defined_in(_DDP),
        ),
    )
