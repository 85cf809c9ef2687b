"""Finds what the code of a forward reads from classes of the user's: ``Config.scale``, ``self.config_class.scale``.

Nothing tells of a read of an attribute of a class. So each class that comes into reach of a trace (a global, an
attribute of a module or of a class, an import in a function) is held against the names in the code of each function
that runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign, is_installed, is_only_filled
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    GLOBAL,
    ITEM,
    MISSING,
    Place,
    attributes_of,
    is_plain,
)
from ort_zero.ortmodule.runtime.export.callables import place_of
from ort_zero.ortmodule.runtime.export.functions_with_values import CONTAINERS, own_global_names


class ClassReads:
    """The reads of classes of one trace.

    Args:
        add: called with the place and the value of each attribute that counts.
        look_into: called with each container of which the code does more than to fill it.
    """

    def __init__(self, add: Callable[[Place, Any], None], look_into: Callable[[Any], None]):
        self._add = add
        self._look_into = look_into
        self._codes: list[CodeType] = []
        self._classes: list[type] = []

    def entered(self, code: CodeType) -> None:
        """Note what a function that runs for the first time may read from the classes that are in reach."""
        self._codes.append(code)
        for kind in list(self._classes):
            self.note(code, kind)

    def note_weights(self, code: CodeType, weights: Iterable[torch.Tensor]) -> None:
        """Note what a function may read from the attributes that somebody has given to weights."""
        names = names_in(code)
        for weight in weights:
            own = attributes_of(weight) or {}
            for name in names & own.keys():
                if is_plain(own[name]):
                    self._add(place_of(weight).then(ATTRIBUTE, name), own[name])

    def in_reach(self, kind: type) -> None:
        """Note what the functions that have run may read from a class, and what later ones may."""
        if kind in self._classes or not is_users_class(kind):
            return
        self._classes.append(kind)
        for code in self._codes:
            self.note(code, kind)

    def note(self, code: CodeType, kind: type) -> None:
        """Note the attributes that a function may read from a class, whoever has written it."""
        place = place_of_class(kind)
        for name in sorted(names_in(code)):
            part = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), MISSING)
            if isinstance(part, type):
                self.in_reach(part)
            elif isinstance(part, CONTAINERS) and not is_only_filled(code, name, attribute=True):
                self._look_into(part)
            if part is not MISSING and (is_plain(part) or isinstance(part, (*CONTAINERS, torch.Tensor))):
                self._add(place.then(ATTRIBUTE, name), part)


def place_of_class(kind: type) -> Place:
    """Return the place of a class: its name in its module, if that leads to it."""
    held = vars(sys.modules.get(kind.__module__, sys)).get(kind.__name__) is kind
    return Place((GLOBAL, kind.__module__), ((ITEM, kind.__name__),)) if held else place_of(kind)


def is_users_class(kind: type) -> bool:
    """Return whether a class stands in a file of the user's, and not in an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or bool(file) and not is_foreign(file) and not is_installed(file)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes in a function, and its strings that may be one: ``getattr(Config, "scale")``."""
    strings = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    return frozenset(name for name in own_global_names(code)[1] | strings if not name.startswith("__"))
