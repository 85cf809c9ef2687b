"""Patch torch's Adam and AdamW to update large flat tensors in pieces that stay in the processor's cache.

Adam makes nine operations of an update, each over the whole tensor, and two tensors of its size. ZeRO gives it all
parameters of a rank as one tensor. torch's ``fused=True`` reads each element once and is faster, with other last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ort_zero.utils.patching import Patch

_PIECE = 1 << 16
"""Elements that Adam updates at once: parameter, gradient, moments, temporaries take 1.5 MiB, less than an L2 cache."""
_INIT_GROUP = "_init_group"
_CLASSES = torch.optim.Adam, torch.optim.AdamW
_OTHER_WAYS = ("fused", "foreach", "differentiable", "capturable")


def patches() -> tuple[Patch, ...]:
    """Return the patches of ``_init_group`` of torch's Adam and AdamW, which lists the tensors that a step updates.

    Flat tensors on the CPU are listed in pieces, and updated bitwise as without. Derived classes keep their lists;
    so do groups that are updated in another way (``fused``, ``foreach``, ``differentiable``, ``capturable``).
    """
    # when Dynamo is first used it replaces these methods itself: once they are patched nothing else may replace them
    torch.compile(lambda: None, backend="eager")
    return tuple(
        Patch(target=f"{kind.__module__}:{kind.__name__}.{_INIT_GROUP}", build=_in_pieces, why="large flat tensors")
        for kind in _CLASSES
        if _INIT_GROUP in vars(kind)  # AdamW is a kind of Adam since torch 2.7
    )


def _in_pieces(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _init_group(
        self: torch.optim.Optimizer, group: dict[str, Any], parameters: list[torch.Tensor], *rest: Any
    ) -> Any:
        result = original(self, group, parameters, *rest)
        if type(self) in _CLASSES and not any(group.get(name) for name in _OTHER_WAYS):
            counts = [_pieces_of(parameter) for parameter in parameters]
            for values in (parameters, *rest):
                if isinstance(values, list) and len(values) == len(counts):
                    values[:] = [piece for value, n in zip(values, counts, strict=True) for piece in _divided(value, n)]
        return result

    return _init_group


def _pieces_of(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() // _PIECE) if parameter.dim() == 1 and parameter.device.type == "cpu" else 1


def _divided(value: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Return views of 65,536 elements of a flat tensor, or a copy of Adam's step counter for each: an update adds 1."""
    if pieces <= 1:
        return [value]
    if value.dim():
        return list(value.detach().split(_PIECE))
    return [value, *(value.clone() for _ in range(pieces - 1))]
