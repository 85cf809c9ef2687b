"""Tells which objects have attributes that Python code may read, and which functions hold values of their own."""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, GeneratorType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import global_names, is_foreign
from ort_zero.ortmodule.runtime.export.attribute_paths import ATTRIBUTE, MODULE, Place, defaults_of

CONTAINERS = (list, dict, collections.deque)
"""Types of containers whose contents may change in place."""
_OF_CONTAINERS = tuple({type(iter(kind())) for kind in (list, tuple, dict, set, str, bytes)})
_VIEWS: tuple[Any, ...] = ({}.values(), {}.items(), range(0), range(2**64))
_OF_VIEWS = tuple({type(iter(view)) for view in _VIEWS})
_OF_FUNCTIONS: tuple[type, ...] = (map, filter, zip, enumerate, reversed, type(reversed([])), type(iter(int, 1)))
_OF_ITERTOOLS = tuple(value for value in vars(itertools).values() if isinstance(value, type))
ITERATORS: tuple[type, ...] = (GeneratorType, *_OF_CONTAINERS, *_OF_VIEWS, *_OF_FUNCTIONS, *_OF_ITERTOOLS)
"""Types of iterators that tell nobody where they stand; those of the user's classes have attributes."""


def has_readable_attributes(value: Any) -> bool:
    """Return whether a value is an instance of a class of the user's, or of a library, written in Python."""
    kind = type(value)
    if kind is argparse.Namespace:
        return True
    made_in_python = kind.__new__ is object.__new__ or isinstance(kind.__new__, FunctionType)
    if not made_in_python or isinstance(value, (BaseException, *ITERATORS)):
        return False
    if not all(cls.__flags__ & (1 << 9) for cls in kind.__mro__[:-1]):  # Py_TPFLAGS_HEAPTYPE
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or bool(file) and not is_foreign(file)


def own_global_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names that `code` itself looks up as globals, and those of its attributes."""
    return global_names(code.replace(co_consts=tuple(c for c in code.co_consts if not isinstance(c, CodeType))))


def has_values(function: FunctionType) -> bool:
    """Return whether a function has variables of functions around it, or containers as default values."""
    return bool(function.__closure__) or any(isinstance(value, CONTAINERS) for value in defaults_of(function).values())


def methods_of(model: torch.nn.Module) -> Iterator[tuple[Place, Any, FunctionType]]:
    """Yield the methods that users and libraries have written for the classes of a model's modules.

    Yields:
        A place that leads to the method by one of the modules, what is there (a function, a property, a class
        method), and the function.
    """
    seen: set[tuple[type, str]] = set()
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if is_foreign(getattr(sys.modules.get(cls.__module__), "__file__", None) or ""):
                continue
            for name, value in list(vars(cls).items()):
                if (cls, name) in seen or name in vars(module):
                    continue
                seen.add((cls, name))
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    yield Place((MODULE, path), ((ATTRIBUTE, name),)), value, function
