"""Follows a traced forward that switches ``requires_grad`` of parameters off, and on again.

A trace does not know of it: the gradient graph is built from what is computed. So what is computed from a parameter
while it is switched off is traced with ``detach()``, where ONNX Runtime's gradient stops.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

_C: Any = torch._C


class GradientSwitches:
    """The parameters that one traced forward has switched.

    Args:
        frozen: ``id()`` of the parameters that are frozen when the forward begins.

    Attributes:
        first: each parameter that was switched, with what it was before, by its ``id()``.
    """

    def __init__(self, frozen: Collection[int] = ()) -> None:
        self._frozen = frozen
        self.first: dict[int, tuple[torch.nn.Parameter, bool]] = {}
        self._stopped: dict[int, torch.Tensor | None] = {}
        """What takes the place of each parameter that is switched off, None before its first use."""

    def note(self, parameter: torch.nn.Parameter, wanted: bool) -> str | None:
        """Note that a parameter is switched; return what a graph cannot follow, None for nothing of the kind."""
        if wanted and id(parameter) in self._frozen:
            return "switches the gradient of a frozen parameter on"
        with _C.DisableTorchFunction():
            before = parameter.requires_grad
        if wanted is before:
            return None
        self.first.setdefault(id(parameter), (parameter, before))
        if wanted:
            self._stopped.pop(id(parameter), None)
        else:
            self._stopped[id(parameter)] = None
        return None

    def put_into(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return arguments of a function in which no gradient reaches a parameter that is switched off."""
        if not self._stopped:
            return args, kwargs
        return tuple(map(self._put, args)), {name: self._put(value) for name, value in kwargs.items()}

    def _put(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(map(self._put, value))
        if id(value) not in self._stopped:
            return value
        if self._stopped[id(value)] is None:
            self._stopped[id(value)] = value.detach()
        return self._stopped[id(value)]
