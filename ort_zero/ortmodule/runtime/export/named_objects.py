"""Gives functions and objects names under which a place finds them again for as long as they live."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from types import FunctionType
from typing import Any

_MOST_WRAPPERS = 16
"""Number of decorators through which a function is looked for."""
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


def lasting_name(value: Any) -> str | None:
    """Return the name by which every process finds an object again that has loaded its module; None if it has none.

    ``"transformers.models.gpt2.modeling_gpt2:GPT2Model.forward:1"`` is what the decorator of a method has wrapped.
    Other objects are found among the globals of the module of their class.
    """
    if isinstance(value, FunctionType):
        names = [f"{value.__module__}:{value.__qualname__}:{depth}" for depth in range(_MOST_WRAPPERS)]
    else:
        module = type(value).__module__
        held = vars(sys.modules[module]) if module in sys.modules else {}
        names = [f"{module}:{name}:0" for name, one in list(held.items()) if one is value]
    return next((name for name in names if object_with(name) is value), None)


def object_with(name: str) -> Any:
    """Return the object of a :func:`lasting_name`, None if this process has none."""
    module, path, depth = name.rsplit(":", 2)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # no getattr: a lazy module would import, and a descriptor would bind
        holders = found.__mro__ if isinstance(found, type) else (found,)
        found = next((vars(one)[part] for one in holders if part in getattr(one, "__dict__", ())), None)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    for _ in range(int(depth)):
        found = getattr(found, "__wrapped__", None)
    return found
