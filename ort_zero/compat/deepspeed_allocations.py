"""Where DeepSpeed's gathers take their memory from. Version 0.19.

A gather of one parameter makes its result with ``torch.empty``. A gather of several makes one vector with
``torch.empty``, and when it has arrived the weight of each by ``torch.cat`` of its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALLOWED = {"dtype", "device", "requires_grad"}


class GatherAllocations(TorchFunctionMode):
    """Lets the vectors that are made in its block come from elsewhere.

    Args:
        take: returns a vector of a number of elements of a type, on the CPU.
    """

    def __init__(self, take: Callable[[int, torch.dtype], torch.Tensor]):
        super().__init__()
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch, or take what it would have allocated."""
        kwargs = kwargs or {}
        if func is torch.empty and _is_plain_vector(args, kwargs):
            return self._take(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.cat and not kwargs and len(args) == 1 and _are_vectors(args[0]):
            pieces = args[0]
            out = self._take(sum(piece.numel() for piece in pieces), pieces[0].dtype)
            return torch.cat(pieces, out=out)
        return func(*args, **kwargs)


def _is_plain_vector(args: tuple, kwargs: dict[str, Any]) -> bool:
    on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    plain = not kwargs.get("requires_grad") and _ALLOWED.issuperset(kwargs)
    return on_cpu and plain and len(args) == 1 and isinstance(args[0], int)


def _are_vectors(pieces: Any) -> bool:
    return bool(pieces) and all(
        piece.dim() == 1 and piece.device.type == "cpu" and piece.dtype == pieces[0].dtype for piece in pieces
    )
