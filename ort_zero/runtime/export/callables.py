"""Finds the functions and objects among a call's arguments whose Python code a trace may run, and gives them places.

``forward(x, note)`` may call ``note``: what that function reads and writes in the variables around it, or in the
attributes of its object, counts as what the model's own code reads and writes. A graph belongs to the very functions
that it was traced with, so a place can start at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch

from ort_zero.compat.frames import is_foreign
from ort_zero.runtime.export.attribute_paths import CALLABLE, Place
from ort_zero.runtime.export.functions_with_values import CONTAINERS, has_readable_attributes
from ort_zero.runtime.export.named_objects import name_of

_MOST_LEVELS = 4
"""Number of functions through whose variables other functions are looked for."""


def place_of(value: Any) -> Place:
    """Return the place that stands for a function or an object itself."""
    return Place((CALLABLE, name_of(value)))


def callables_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's functions among `values` and behind these, and the objects and containers they are methods of.

    Args:
        values: arguments of a call that are no tensors.
    """
    seen: set[int] = set()
    stack = [(value, 0) for value in values]
    while stack:
        value, depth = stack.pop()
        if id(value) in seen or depth > _MOST_LEVELS:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            stack += [(value.__func__, depth), (value.__self__, depth)]
        elif isinstance(value, FunctionType):
            if not is_foreign(value.__code__.co_filename):
                yield value
                stack += [(variable, depth + 1) for variable in variables_of(value)]
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            stack += [(part, depth + 1) for part in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, BuiltinMethodType):
            if isinstance(value.__self__, CONTAINERS):  # items.append
                yield value.__self__
        elif callable(value) and not isinstance(value, (type, torch.nn.Module)) and has_readable_attributes(value):
            yield value
            stack.append((type(value).__call__, depth))


def variables_of(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function has from the functions around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            yield None
