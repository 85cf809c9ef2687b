"""Notices that a forward advances an iterator that outlives it: ``next(self.schedule)``.

Nobody can ask an iterator where it stands, so no guard could compare that, and an export, which runs the module more
often than the user does, would advance it for good. While a module is exported, an object that stands for each
iterator lies in its place: in attributes of modules, objects and classes, containers, globals, variables and default
values of functions, and ``functools.partial``. The module that advances one stays in PyTorch; what its runs during the
export take is there again for the next call, and what a run of a graph takes that did not hold for the next attempt.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import FunctionType, MethodType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.compat.traced_calls import running_modules, user_line
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    CellsOf,
    ClassAttributes,
    DefaultsOf,
    attributes_of,
    defaults_of,
)
from ort_zero.ortmodule.runtime.export.callables import callables_of
from ort_zero.ortmodule.runtime.export.functions_with_values import ITERATORS, has_readable_attributes, methods_of

_INTERNAL = frozenset(vars(torch.nn.Module()))
_DEPTH = 3
"""Number of containers and objects through which iterators are looked for, from an attribute of a module on."""
_MOST_ITEMS = 1000
"""Maximum number of items of a container that is searched; longer ones are data."""


class AdvancedIterator:
    """Stands for an iterator, of whose class it seems to be, while a module is exported.

    Args:
        original: the iterator.
    """

    def __init__(self, original: Any):
        self.__original = original
        self.__taken: list[Any] = []
        self.__next_taken = 0
        self.__may_advance: Callable[[], None] | None = None
        self.__keeps = False

    @property
    def __class__(self) -> Any:
        return type(self.__original)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of an iterator cannot be changed while a module is exported")

    def __iter__(self) -> AdvancedIterator:
        return self

    def __next__(self) -> Any:
        if self.__may_advance is not None:
            self.__may_advance()
        if self.__next_taken == len(self.__taken):
            value = next(self.__original)
            if not self.__keeps:
                return value
            self.__taken.append(value)
        self.__next_taken += 1
        value = self.__taken[self.__next_taken - 1]
        if not self.__keeps:
            self.__forget_taken()
        return value

    def __forget_taken(self) -> None:
        del self.__taken[: self.__next_taken]
        self.__next_taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__original, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itertools.chain, (self.__taken[self.__next_taken :], self.__original)

    def export_begins(self, may_advance: Callable[[], None]) -> None:
        """Keep from now on what is taken, and call `may_advance`, which may raise, each time before."""
        self.__may_advance, self.__keeps = may_advance, True

    def rewind(self) -> None:
        """Give again what was taken since the export began."""
        self.__next_taken = 0

    def export_ends(self) -> Any:
        """Return what has to lie in the place of the iterator from now on: this object if the iterator has advanced."""
        self.__may_advance, self.__keeps = None, False
        self.rewind()
        return self if self.__taken else self.__original

    def run_begins(self) -> None:
        """Keep what the run of a graph takes until :meth:`run_ends`: with :meth:`rewind` it is there again."""
        self.__keeps = True

    def run_ends(self) -> None:
        """Keep nothing of what was taken: the run holds."""
        self.__keeps = False
        self.__forget_taken()


_active: list[AdvancedIterator] = []


def rewind() -> None:
    """Let the iterators give again what the first run of the module in an export has taken."""
    for iterator in _active:
        iterator.rewind()


@contextlib.contextmanager
def unmoved(
    root: torch.nn.Module, runs_in_torch: Callable[[torch.nn.Module], bool], stay: dict[int, AdvancedIterator]
) -> Iterator[None]:
    """Put an :class:`AdvancedIterator` in the place of each iterator that the code of `root` can reach.

    Args:
        root: the model.
        runs_in_torch: tells whether a module runs in PyTorch, so that it may advance iterators.
        stay: is given those that stay in their places after the block, since they have advanced, by their ``id()``.

    Raises:
        ValueReadError: other code of the model advances one.
    """
    inside = {id(module) for module in root.modules()}

    def may_advance() -> None:
        modules = [module for module in running_modules(sys._getframe(2)) if id(module) in inside]
        if not any(map(runs_in_torch, modules)):
            innermost = modules[0] if modules else None
            raise ValueReadError(innermost, "advances an iterator that outlives the call", user_line(), random=True)

    known: dict[int, AdvancedIterator] = {}
    changed: list[tuple[Any, Any, AdvancedIterator]] = []
    for holder, key, value in _places_of_iterators(root):
        if id(value) not in known:
            known[id(value)] = value if type(value) is AdvancedIterator else AdvancedIterator(value)
            known[id(value)].export_begins(may_advance)
        changed.append((holder, key, known[id(value)]))
    for holder, key, stand_in in changed:
        holder[key] = stand_in
    before = list(_active)
    _active[:] = known.values()
    try:
        yield
    finally:
        _active[:] = before
        left = {id(stand_in): stand_in.export_ends() for stand_in in known.values()}
        stay.update((key, value) for key, value in left.items() if id(value) == key)
        for holder, key, stand_in in changed:
            with contextlib.suppress(LookupError, ValueError):
                if holder[key] is stand_in:
                    holder[key] = left[id(stand_in)]


def _places_of_iterators(root: torch.nn.Module) -> list[tuple[Any, Any, Any]]:
    """Return (holder, key, iterator) of each place; an item of the holder can be set by the key."""
    found: list[tuple[Any, Any, Any]] = []
    seen: set[int] = set()
    tuples: list[_TupleIn] = []  # while they live, nothing else has their id()
    stack: list[tuple[Any, int]] = [(vars(module), 0) for module in root.modules()]
    stack += [(cls, 0) for cls in {cls for module in root.modules() for cls in type(module).__mro__}]
    stack += [(function, 0) for _, _, function in methods_of(root)]
    stack += [(value, 0) for value in callables_of(root)]
    while stack:
        value, depth = stack.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        for holder, items in _held(value):
            for key, part in items:
                if key in _INTERNAL and depth == 0:
                    continue
                if isinstance(part, ITERATORS):
                    found.append((holder, key, part))
                elif type(part) is tuple:
                    tuples.append(_TupleIn(holder, key, part))
                    stack.append((tuples[-1], depth + 1))
                elif not isinstance(part, (torch.Tensor, torch.nn.Module)):
                    stack.append((part, depth + 1))
        if isinstance(value, FunctionType) and _is_users(value):
            names = value.__globals__
            if id(names) not in seen:
                seen.add(id(names))
                parts = list(names.values())
                stack += [(part, depth + 1) for part in parts if isinstance(part, (list, dict, FunctionType))]
                found += [(names, name, part) for name, part in list(names.items()) if isinstance(part, ITERATORS)]
    return found


def _held(value: Any) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Return by what the parts of an object can be set as items, each with these parts and their keys."""
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, MutableMapping):
        return [(value, list(value.items()) if isinstance(value, dict) and len(value) <= _MOST_ITEMS else [])]
    if isinstance(value, list):
        return [(value, list(enumerate(value)) if len(value) <= _MOST_ITEMS else [])]
    if isinstance(value, _TupleIn):
        return [(value, list(enumerate(value.items)) if len(value.items) <= _MOST_ITEMS else [])]
    if isinstance(value, FunctionType):
        if not _is_users(value):
            return []
        cells, parts = CellsOf(value), []
        for name in value.__code__.co_freevars:
            with contextlib.suppress(ValueError):  # not set yet
                parts.append((name, cells[name]))
        return [(cells, parts), (DefaultsOf(value), list(defaults_of(value).items()))]
    if isinstance(value, functools.partial):
        return [(_PartsOf(value), [*enumerate(value.args), *value.keywords.items(), ("func", value.func)])]
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
        if is_foreign(file) or is_installed(file):
            return []
        own = ((name, part) for name, part in vars(value).items() if not name.startswith("__"))
        return [(ClassAttributes(value), [(name, part) for name, part in own if not isinstance(part, FunctionType)])]
    attributes = attributes_of(value) if has_readable_attributes(value) else None
    return [(attributes, list(attributes.items()))] if isinstance(attributes, dict) else []


class _TupleIn:
    """Sets items of a tuple by putting another tuple in its place."""

    def __init__(self, holder: Any, key: Any, items: tuple):
        self._holder, self._key = holder, key
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.items = (*self.items[:index], value, *self.items[index + 1 :])
        self._holder[self._key] = self.items


class _PartsOf:
    """Looks up and sets the arguments that a ``functools.partial`` holds, by index or name, and ``"func"``."""

    def __init__(self, partial: functools.partial):
        self._partial = partial

    def __getitem__(self, key: int | str) -> Any:
        partial = self._partial
        if isinstance(key, int):
            return partial.args[key]
        return partial.keywords[key] if key in partial.keywords else partial.func

    def __setitem__(self, key: int | str, value: Any) -> None:
        partial = self._partial
        function, args, keywords = partial.func, partial.args, dict(partial.keywords)
        if isinstance(key, int):
            args = (*args[:key], value, *args[key + 1 :])
        elif key in keywords:
            keywords[key] = value
        else:
            function = value
        setstate: Any = partial.__setstate__  # type: ignore[attr-defined]
        setstate((function, args, keywords, vars(partial)))


def _is_users(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return not is_foreign(file) and not is_installed(file)
