"""Replace the tensors in nested tuples, lists and dicts, such as arguments and results of modules."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def map_slots(function: Callable[[str, torch.Tensor], Any], value: Any, slot: str = "") -> Any:
    """Return `value` with every tensor in its tuples, lists and dicts, which keep their types, replaced.

    ``function(slot, tensor)`` gets the tensor's place in the value, such as ``"[0]"`` or ``".logits"``; the result None
    keeps the tensor. A value without changes is returned itself.
    """
    if isinstance(value, torch.Tensor):
        result = function(slot, value)
        return value if result is None else result
    if isinstance(value, (tuple, list)):
        items = [map_slots(function, item, f"{slot}[{i}]") for i, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key in list(value):
            item = map_slots(function, value[key], f"{slot}.{key}")
            if item is not value[key]:
                # in place: subclasses such as transformers' ModelOutput cannot be rebuilt from items alone
                value[key] = item
    return value


def map_arguments(function: Callable[[str, torch.Tensor], Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return positional and keyword arguments with every tensor replaced, see :func:`map_slots`."""
    return map_slots(function, args), map_slots(function, dict(kwargs))


def map_attributes(function: Callable[[str, torch.Tensor], Any], value: Any) -> None:
    """Replace in place, as :func:`map_slots`, the tensors in attributes of objects that are nested in `value`.

    Tensors of tuples, lists and dicts among these stay. Modules are left out.
    """
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, (torch.Tensor, torch.nn.Module, type, *_VALUES)):
            continue
        seen.add(id(current))
        if isinstance(current, (tuple, list)):
            waiting += current
        elif isinstance(current, dict):
            waiting += current.values()
        for name, item in _attributes(current).items():
            mapped = map_slots(function, item)
            if mapped is not item:
                object.__setattr__(current, name, mapped)  # a frozen dataclass has another __setattr__
            waiting.append(mapped)


_VALUES = (type(None), bool, int, float, complex, str, bytes, types.FunctionType, types.MethodType, types.ModuleType)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, also those in slots."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes | getattr(value, "__dict__", {})
