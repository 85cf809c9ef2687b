"""Which objects are what their attributes are, and what is inside of them."""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ort_zero.ortmodule.compat.torch_modules import attributes_held

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, slice)
"""Types of the values that compare by what they are, and are constants of a graph."""


def is_plain(kind: type) -> bool:
    """Return whether instances of the class are what their attributes are: no module, function, class or type of C."""
    called = any("__call__" in vars(cls) for cls in kind.__mro__)
    opaque = called or issubclass(kind, (type, torch.nn.Module, ModuleType, Iterator))
    if opaque and not is_cache_type(kind):  # in transformers up to 4.48 that is a module, though it has no forward
        return False
    plain = kind.__new__ is object.__new__ or issubclass(kind, SimpleNamespace)
    return plain and _slots_of(kind) is not None


def _find_slots(kind: type) -> tuple[str, ...] | None:
    """Return the names in ``__slots__`` of a class that is written in Python all the way; None for others."""
    names: list[str] = []
    for cls in kind.__mro__[:-1]:
        if cls is SimpleNamespace:
            continue
        if cls.__module__ == "builtins" or not cls.__flags__ & (1 << 9):  # Py_TPFLAGS_HEAPTYPE
            return None
        slots = vars(cls).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


_slots_of: Callable[[type], tuple[str, ...] | None] = functools.cache(_find_slots)


def attributes_in(item: Any) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of an object's attributes, those in slots first."""
    missing = object()
    slots = [(name, getattr(item, name, missing)) for name in _slots_of(type(item)) or ()]
    own = attributes_held(item) if isinstance(item, torch.nn.Module) else getattr(item, "__dict__", {})
    return [pair for pair in slots if pair[1] is not missing] + list(own.items())


def bare(kind: Any) -> Any:
    """Return an instance without the attributes that :func:`attributes_in` finds: ``__init__`` may want more."""
    made = kind.__new__(kind)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
    return made


def holds_tensors(item: Any, seen: set[int], depth: int = 6) -> bool:
    """Return True if a computed tensor is inside `item`; modules and their parameters are no results."""
    if isinstance(item, torch.Tensor):
        return not isinstance(item, torch.nn.Parameter)
    if depth == 0 or id(item) in seen or isinstance(item, (*PLAIN, ModuleType)):
        return False
    if callable(item) and not is_cache(item):
        return False
    seen.add(id(item))
    if isinstance(item, Mapping):
        parts: list[Any] = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        parts = list(item)
    else:
        parts = [value for _, value in attributes_in(item)]
    return any(holds_tensors(part, seen, depth - 1) for part in parts)


def is_cache(item: Any) -> bool:
    """Return True for a transformers cache; imports nothing."""
    return is_cache_type(type(item))


def is_cache_type(kind: type) -> bool:
    """Return True for a class of transformers' caches of keys and values."""
    return any(c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils" for c in kind.__mro__)
