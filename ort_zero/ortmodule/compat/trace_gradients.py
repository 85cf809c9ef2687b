"""Answers what a traced forward asks about gradients: ``weight.requires_grad``, ``y.grad_fn is None``.

A trace is made with gradients wherever there could be any, so that the exported model serves when a layer is set free.
Python code must learn there what it learns when PyTorch runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ort_zero.ortmodule.compat.torch_autograd import leaves_behind

_C: Any = torch._C
_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "grad"})
UNANSWERED: Any = object()
"""For what the trace itself answers."""


def property_read(func: Any) -> str:
    """Return the name of the property of a tensor, of those about gradients, that `func` reads; "" for none."""
    if getattr(func, "__name__", "") != "__get__":
        return ""
    name = getattr(func.__self__, "__name__", "")
    return name if name in _PROPERTIES else ""


class GradientReads:
    """What one traced forward asks about gradients.

    Args:
        frozen: ``id()`` of the parameters that want no gradient outside of the trace.
        originals: the tensors of the call by the ``id()`` of those that stand for them in the trace.

    Attributes:
        any: whether the forward has asked at all.
    """

    def __init__(self, frozen: Collection[int] = (), originals: Mapping[int, torch.Tensor] | None = None):
        self._frozen = frozen
        self._originals = originals or {}
        self.any = False

    def answer(self, name: str, tensor: torch.Tensor) -> Any:
        """Return what PyTorch would say of a tensor; :data:`UNANSWERED` if the trace says the same.

        Args:
            name: of the property, see :func:`property_read`.
            tensor: one of the trace.
        """
        self.any = True
        with _C.DisableTorchFunction():
            original = self._originals.get(id(tensor))
            if original is not None:
                return getattr(original, name)
            if not tensor.requires_grad or self._is_wanted(tensor):
                return UNANSWERED
            return {"requires_grad": False, "is_leaf": True}.get(name)

    def _is_wanted(self, tensor: torch.Tensor) -> bool:
        """Return whether a gradient of the tensor would reach anything that wants one outside of the trace."""
        leaves = [tensor] if tensor.is_leaf else leaves_behind([tensor.grad_fn])
        return any(map(self._wants, leaves))

    def _wants(self, leaf: torch.Tensor) -> bool:
        original = self._originals.get(id(leaf))
        return original.requires_grad if original is not None else id(leaf) not in self._frozen
