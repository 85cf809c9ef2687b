"""Makes inputs of a graph of attributes that change at every step: a loss weight, a temperature, a schedule.

While the module is traced, a number is a tensor without axes (a float of the model's precision, an integer of 64 bits),
and a tensor another tensor. A run of the graph takes the values of that moment.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    MISSING,
    Place,
    PlaceFinder,
    SlotsOf,
    attributes_of,
    is_number,
    step_into,
)


class AttributeInputError(BaseException):
    """An attribute cannot be an input of the graph: its number is wanted for a Python value.

    Not an Exception: no ``except`` of a model may take it for one of its own.
    """

    def __init__(self, places: Sequence[Place], why: str):
        super().__init__(why)
        self.places = tuple(places)


class AttributeInputs:
    """The attributes that one export takes as inputs.

    Args:
        module: the user's module.
        names: name of the input of each attribute.
        device: device of the module.
    """

    def __init__(self, module: torch.nn.Module, names: Mapping[Place, str], device: torch.device):
        self._module = module
        dtype = float_dtype(module)
        finder = PlaceFinder(module)
        found = {place: finder.value_at(place) for place in names}
        self.names = {place: name for place, name in names.items() if can_be_input(found[place])}
        """Name of the input of each attribute that is a number or a tensor at the moment."""
        self.tensors = [as_tensor(found[place], dtype, device) for place in self.names]
        """Values of the inputs at the moment."""
        self.numbers = [i for i, place in enumerate(self.names) if is_number(found[place])]
        """Indices of the inputs that are numbers for Python."""

    @contextlib.contextmanager
    def placed(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the attributes be `tensors` in the block."""
        undo: list[tuple[Any, Any, Any]] = []
        finder = PlaceFinder(self._module)
        try:
            for place, tensor in zip(self.names, tensors, strict=True):
                undo.append(put(finder, place, tensor))
            yield
        finally:
            for container, key, value in reversed(undo):
                if value is MISSING:
                    container.pop(key, None)
                else:
                    _put(container, key, value)

    def changed(
        self, tensors: Sequence[torch.Tensor], versions: Sequence[int]
    ) -> list[tuple[Place, bool, torch.Tensor]]:
        """Return the attributes that the forward has changed for the next call: whether in place, and the new value.

        Args:
            tensors: those of :meth:`placed`.
            versions: how often each of them had been changed in place before the forward.
        """
        finder, found = PlaceFinder(self._module), []
        for place, tensor, version in zip(self.names, tensors, versions, strict=True):
            value = finder.value_at(place)
            if value is tensor and version_of(tensor) == version:
                continue
            if isinstance(value, (int, float)):
                value = torch.tensor(value, device=tensor.device)
            if isinstance(value, torch.Tensor):
                found.append((place, value is tensor, value.detach()))
        return found


def put(finder: PlaceFinder, place: Place, value: Any) -> tuple[Any, Any, Any]:
    """Give an attribute another value; return container, key, and what was there, MISSING for nothing."""
    holder = finder.value_at(place.holder)
    before, container, key = step_into(holder, *place.steps[-1])
    if isinstance(container, MappingProxyType):  # of the class: the instance's own comes first
        before, container = MISSING, attributes_of(holder)
    if isinstance(container, ChainMap):  # what is put into it goes to the first of its dicts, whichever had it
        container = next((part for part in container.maps if key in part), container)
    _put(container, key, value)
    return container, key, before


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, SlotsOf):
        object.__setattr__(container.owner, key, value)
    else:
        container[key] = value


def can_be_input(value: Any) -> bool:
    """Return whether a value can be an input of a graph."""
    return is_number(value) or (
        isinstance(value, torch.Tensor)
        and not value.requires_grad
        and not value.is_complex()
        and value.layout == torch.strided
    )


def float_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype in which a graph takes floats: as wide as the module's weights, and no less than 32 bits."""
    wide = torch.get_default_dtype() == torch.float64 or any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if wide else torch.float32


def as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a value as an input of a graph.

    Args:
        value: a number or a tensor.
        dtype: of floats.
        device: of numbers.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    whole = isinstance(value, (int, np.integer))
    return torch.tensor(int(value) if whole else float(value), dtype=torch.int64 if whole else dtype, device=device)
