"""Says which calls PyTorch runs as a whole, though the module runs in ONNX Runtime otherwise.

:class:`.runtime.runtime.Runtime` asks before it looks for a graph; :mod:`.calls_in_torch` counts such calls.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch.nn.parameter import is_lazy

from ort_zero.ortmodule.compat.torch_transforms import in_transform
from ort_zero.ortmodule.runtime.calls_in_torch import EMPTY, PROFILED, TRANSFORMED, UNINITIALIZED
from ort_zero.ortmodule.runtime.export import pytree


def reason_in_state(module: torch.nn.Module, stage: int, *, first: bool, profiled: bool) -> str | None:
    """Return why PyTorch runs a call whatever its arguments are; None where nothing is in the way of a graph.

    Args:
        module: the user's module.
        stage: ZeRO stage of the engine.
        profiled: whether DeepSpeed counts the operations of the step, on all ranks alike.
        first: whether no graph has been looked for yet: lazy modules are initialized by their first call.
    """
    if profiled:
        return PROFILED
    if stage == 3:
        return None  # the other ranks wait for the collectives of the graph
    if in_transform():
        return TRANSFORMED
    if first and any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        return UNINITIALIZED
    return None


def reason_in_arguments(args: tuple, kwargs: dict) -> str | None:
    """Return why PyTorch runs a call with these arguments: a batch of size 0, for which many kernels of ORT fail.

    None for other arguments.
    """
    tensor = pytree.first_tensor((args, kwargs))
    return EMPTY if tensor is not None and tensor.numel() == 0 else None
