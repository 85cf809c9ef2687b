"""Have torch's Adam update a large tensor piece by piece, so that a piece stays in the processor's cache.

Adam makes nine operations of an update, each over the whole tensor, and two tensors of its size. ZeRO gives it all
parameters of a rank as one tensor. torch's ``fused=True`` reads each element once and is faster, with other last bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_PIECE = 1 << 16
"""Elements of a piece: with moments and intermediate results 1.5 MiB in fp32, which the second-level cache holds."""
_INIT_GROUP = "_init_group"
_OTHER_WAYS = ("fused", "foreach", "differentiable", "capturable")


def update_in_pieces(optimizer: Any) -> None:
    """Have an Adam or AdamW of torch update large flat tensors on the CPU in pieces, bitwise as without them.

    Does nothing for other optimizers, classes derived from these two included, and for groups of parameters that are
    updated in another way (``fused``, ``foreach``, ``differentiable``, ``capturable``).
    """
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        setattr(optimizer, _INIT_GROUP, _Pieces(optimizer).init_group)


class _Pieces:
    """Stands between an optimizer's step and the method that lists what it updates."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = weakref.ref(optimizer)

    def init_group(self, group: dict[str, Any], parameters: list[torch.Tensor], *rest: Any) -> Any:
        """List a group's parameters, gradients, moments and steps as torch does, then divide what is large."""
        optimizer: Any = self._optimizer()
        result = getattr(type(optimizer), _INIT_GROUP)(optimizer, group, parameters, *rest)
        if not any(group.get(name) for name in _OTHER_WAYS):
            counts = [_pieces_of(parameter) for parameter in parameters]
            for values in (parameters, *rest):
                if isinstance(values, list) and len(values) == len(counts):
                    values[:] = [piece for value, n in zip(values, counts, strict=True) for piece in _divided(value, n)]
        return result


def _pieces_of(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() // _PIECE) if parameter.dim() == 1 and parameter.device.type == "cpu" else 1


def _divided(value: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Return views of the pieces of a tensor. The count of steps has none: each update adds 1, so it is copied."""
    if pieces == 1:
        return [value]
    if value.dim():
        return list(value.detach().split(_PIECE))
    return [value, *(value.clone() for _ in range(pieces - 1))]
