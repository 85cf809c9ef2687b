"""Finds the functions and objects whose Python code a trace may run besides methods of modules, and gives them places.

``forward(x, note)`` may call ``note``, and so may a hook, or a function in an attribute of a module: what that function
reads and writes in the variables around it, or in the attributes of its object, counts as what the model's own code
reads and writes. A graph belongs to the very functions that it was traced with, so a place can start at them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.compat.torch_modules import forward_hooks, global_forward_hooks, is_infrastructure
from ort_zero.ortmodule.runtime.export.attribute_paths import CALLABLE, Place
from ort_zero.ortmodule.runtime.export.functions_with_values import CONTAINERS, has_readable_attributes
from ort_zero.ortmodule.runtime.export.named_objects import name_of

_MOST_LEVELS = 4
"""Number of functions through whose variables other functions are looked for."""
_MOST_ITEMS = 64
"""Maximum number of items of a container among which functions are looked for."""
_INTERNAL = frozenset(vars(torch.nn.Module()))
_FUNCTIONS = (FunctionType, MethodType, functools.partial)


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
        if isinstance(value, type):  # functools.partial itself looks like one of its instances
            continue
        if isinstance(value, MethodType):
            stack.append((value.__func__, depth))
            if has_readable_attributes(value.__self__) and not isinstance(value.__self__, torch.nn.Module):
                yield value.__self__
        elif isinstance(value, FunctionType):
            if not is_foreign(value.__code__.co_filename):
                yield value
                stack += [(variable, depth + 1) for variable in variables_of(value)]
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            if isinstance(value, functools.partial):
                yield value
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


def hooks_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what :func:`callables_in` finds behind the hooks around the forward of a model and of the modules in it.

    Hooks of DeepSpeed and ours are left out: an export runs without them.
    """
    found: list[Any] = global_forward_hooks()
    for module in model.modules():
        for hooks in forward_hooks(module).values():
            found += hooks
    yield from callables_in(hook for hook in found if not is_infrastructure(hook))


def callables_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what :func:`callables_in` finds behind hooks, and functions in attributes and globals, of a model."""
    yield from hooks_of(model)
    found: list[Any] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in _INTERNAL:
                found += _functions_in(value)
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules.get(name)
        file = getattr(source, "__file__", None) or ""
        if source is not None and not (is_foreign(file) or is_installed(file)):
            for value in list(vars(source).values()):
                found += _functions_in(value)
    yield from callables_in(found)


def _functions_in(value: Any) -> list[Any]:
    """Return the functions with values of their own that a value is, or holds."""
    if isinstance(value, CONTAINERS) or isinstance(value, tuple):
        if len(value) > _MOST_ITEMS:
            return []
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        return [part for part in parts if isinstance(part, _FUNCTIONS)]
    return [value] if isinstance(value, _FUNCTIONS) else []
