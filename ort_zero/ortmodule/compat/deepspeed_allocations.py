"""Where DeepSpeed's gathers take their memory from. Version 0.19.

A gather of one parameter makes its result with ``torch.empty``. A gather of several makes one vector with
``torch.empty``, and when it has arrived the weight of each by ``torch.cat`` of its pieces. The module that does this
reads both from its global ``torch``, in whose place another object is put for as long as a gather runs. A function mode
of torch would see the calls too, at about 2 us for each of more than 1,000 calls of a step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

_MODULE = "deepspeed.runtime.zero.partition_parameters"
_ALLOWED = {"dtype", "device", "requires_grad"}


class GatherAllocations:
    """Lets the vectors that DeepSpeed's gathers make in its block, in the thread that enters it, come from elsewhere.

    Blocks of one thread may be nested.

    Args:
        take: returns a vector of a number of elements of a type, on the CPU.
    """

    def __init__(self, take: Callable[[int, torch.dtype], torch.Tensor]):
        self._torch = _TorchOfGathers(take)
        self._names: dict[str, Any] = vars(sys.modules[_MODULE])
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer.append(self._names["torch"])
        self._torch.thread = threading.get_ident()
        self._names["torch"] = self._torch

    def __exit__(self, *error: object) -> None:
        self._names["torch"] = self._outer.pop()


class _TorchOfGathers:
    """Stands for the module ``torch``: all of it but what allocates for a gather is torch's own."""

    def __init__(self, take: Callable[[int, torch.dtype], torch.Tensor]):
        self.thread = 0
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_plain_vector(args, kwargs) and self.thread == threading.get_ident():
            return self._take(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        return torch.empty(*args, **kwargs)

    def cat(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and _are_vectors(args[0]) and self.thread == threading.get_ident():
            pieces = args[0]
            out = self._take(sum(piece.numel() for piece in pieces), pieces[0].dtype)
            return torch.cat(pieces, out=out)
        return torch.cat(*args, **kwargs)


def _is_plain_vector(args: tuple, kwargs: dict[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], int) or kwargs.get("requires_grad"):
        return False
    return _ALLOWED.issuperset(kwargs) and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _are_vectors(pieces: Any) -> bool:
    return bool(pieces) and all(
        piece.dim() == 1 and piece.device.type == "cpu" and piece.dtype == pieces[0].dtype for piece in pieces
    )
