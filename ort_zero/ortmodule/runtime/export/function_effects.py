"""Puts back what functions change outside of the model when an export calls them: a graph's node calls them again.

Autograd Functions and submodules that PyTorch runs inside the graph run twice while a graph is made, and then at each
run of it. Their counters and lists must see the runs alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign
from ort_zero.ortmodule.runtime.export.attribute_paths import CellsOf, attributes_of, defaults_of, is_number
from ort_zero.ortmodule.runtime.export.callables import callables_in, variables_of
from ort_zero.ortmodule.runtime.export.functions_with_values import (
    CONTAINERS,
    has_readable_attributes,
    own_global_names,
)
from ort_zero.ortmodule.utils.containers import items_held, put_back

_MOST_LEVELS = 3
"""Number of functions that call each other, or of objects that hold each other, through which values are looked for."""


class FunctionEffects:
    """The values that functions reach in globals and in the variables around them, as they were when noted."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._containers: list[tuple[Any, Any]] = []
        self._numbers: list[tuple[Any, str, Any]] = []

    def note(self, values: Iterable[Any]) -> None:
        """Note what `values`, functions and arguments of functions, reach now; what was noted before stays so."""
        for value in values:
            self._note(value, 0)

    def put_back(self) -> None:
        """Give everything that was noted its value of that time."""
        for container, copy in self._containers:
            put_back(container, copy)
        for variables, name, number in self._numbers:
            variables[name] = number

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _MOST_LEVELS or isinstance(value, (torch.Tensor, torch.nn.Module, type)):
            return
        if isinstance(value, CONTAINERS):
            self._take(value)
        elif isinstance(value, FunctionType):
            if not is_foreign(value.__code__.co_filename):
                self._note_function(value, depth)
        elif has_readable_attributes(value):
            self._seen.add(id(value))
            self._alive.append(value)
            own = attributes_of(value)
            if own is not None:
                self._note_variables(own, own, depth)
        else:
            for found in callables_in([value]):
                if isinstance(found, functools.partial):
                    for part in (*found.args, *found.keywords.values()):
                        self._note(part, depth + 1)
                else:
                    self._note(found, depth)

    def _note_function(self, function: FunctionType, depth: int) -> None:
        self._seen.add(id(function))
        self._alive.append(function)
        names, _ = own_global_names(function.__code__)
        self._note_variables(function.__globals__, {n: v for n, v in function.__globals__.items() if n in names}, depth)
        cells = dict(zip(function.__code__.co_freevars, variables_of(function), strict=False))
        self._note_variables(CellsOf(function), cells, depth)
        for value in defaults_of(function).values():
            self._note(value, depth + 1)

    def _note_variables(self, variables: Any, values: dict[str, Any], depth: int) -> None:
        for name, value in values.items():
            if is_number(value):
                self._numbers.append((variables, name, value))
            else:
                self._note(value, depth + 1)

    def _take(self, container: Any) -> None:
        self._seen.add(id(container))
        self._alive.append(container)
        self._containers.append((container, items_held(container)))
