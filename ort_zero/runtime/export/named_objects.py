"""Gives functions and objects names under which a place finds them again for as long as they live."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

_numbers = itertools.count(1)
_names: dict[int, tuple[Any, str]] = {}
"""A reference to each object that has a name, and the name, by the object's ``id()``."""
_objects: dict[str, Any] = {}


def name_of(value: Any) -> str:
    """Return the name of a function or object, ``"note:3"``; gives it one if it has none."""
    known = _names.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    name = f"{getattr(value, '__qualname__', type(value).__qualname__)}:{next(_numbers)}"
    key = id(value)

    def forget(_: Any) -> None:
        _names.pop(key, None)
        _objects.pop(name, None)

    try:
        reference: Any = weakref.ref(value, forget)
    except TypeError:  # an object with slots
        reference = functools.partial(_same, value)
    _names[key] = reference, name
    _objects[name] = reference
    return name


def _same(value: Any) -> Any:
    return value


def value_named(name: str) -> Any:
    """Return the function or object of that name, None if it is gone."""
    reference = _objects.get(name)
    return reference() if reference is not None else None
