"""Tells which objects have attributes that Python code may read, and which functions hold values of their own."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from ort_zero.compat.frames import global_names, is_foreign
from ort_zero.runtime.export.attribute_paths import ATTRIBUTE, MODULE, Place, defaults_of

CONTAINERS = (list, dict, collections.deque)
"""Types of containers whose contents may change in place."""


def has_readable_attributes(value: Any) -> bool:
    """Return whether a value is an instance of a class of the user's, or of a library, written in Python."""
    kind = type(value)
    if kind is argparse.Namespace:
        return True
    if kind.__new__ is not object.__new__ or isinstance(value, (BaseException, Iterator)):
        return False
    if not all(cls.__flags__ & (1 << 9) for cls in kind.__mro__[:-1]):  # Py_TPFLAGS_HEAPTYPE
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or bool(file) and not is_foreign(file)


def own_global_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names that `code` itself looks up as globals, and those of its attributes."""
    return global_names(code.replace(co_consts=tuple(c for c in code.co_consts if not isinstance(c, CodeType))))


def functions_of(model: torch.nn.Module) -> Iterator[tuple[CodeType, tuple[Place, Any]]]:
    """Yield the code of each method that holds values, with a place to find it.

    The values are variables of the functions around it, and containers as default values of its parameters.
    """
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if is_foreign(getattr(sys.modules.get(cls.__module__), "__file__", None) or ""):
                continue
            for name, value in vars(cls).items():
                if isinstance(value, FunctionType) and (
                    value.__closure__ or any(isinstance(v, CONTAINERS) for v in defaults_of(value).values())
                ):
                    yield value.__code__, (Place((MODULE, path), ((ATTRIBUTE, name),)), value)
