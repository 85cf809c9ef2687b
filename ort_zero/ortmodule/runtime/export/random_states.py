"""Finds the generators of random numbers that a module may draw from: Python's, NumPy's and PyTorch's.

An export runs a module more often than the user does: :func:`preserved` hides that from the generators.
:class:`GeneratorStates` tells whether code has drawn from one of Python's or NumPy's.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from ort_zero.ortmodule.compat.frames import is_foreign

_PYTHON: Any = getattr(random.random, "__self__", None)
"""The generator behind the functions of the module ``random``."""
_OF_PYTHON = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_GENERATORS = (*_OF_PYTHON, torch.Generator)
_BOUND = frozenset({"builtin_function_or_method", "cython_function_or_method", "method"})
_DEPTH = 3
"""Number of objects through which a generator is looked for, from an attribute of a module on."""
_MOST_ITEMS = 1000
"""Maximum number of items of a list or table that is searched; longer ones are data."""
_INTERNAL = frozenset(vars(torch.nn.Module()))


class GeneratorStates:
    """Remembers the states of generators of Python and NumPy, and tells which of them have moved.

    Args:
        generators: as :func:`generators_of` returns them; those of PyTorch are left out, since draws from them are
            part of a trace.
    """

    def __init__(self, generators: Iterable[Any]):
        self._generators = [generator for generator in generators if isinstance(generator, _OF_PYTHON)]
        self._states = [_comparable(_state(generator)) for generator in self._generators]

    def moved(self) -> str | None:
        """Return the name of the first generator that has moved since the last call, None if none has."""
        states = [_comparable(_state(generator)) for generator in self._generators]
        before, self._states = self._states, states
        names = (name_of(g) for g, a, b in zip(self._generators, before, states, strict=True) if a != b)
        return next(names, None)


@contextlib.contextmanager
def preserved(root: torch.nn.Module) -> Iterator[None]:
    """Put all generators that `root` may draw from back to their states at the start, also after an error."""
    states = [(generator, _state(generator)) for generator in generators_of(root)]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        for generator, state in states:
            _set_state(generator, state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


class GlobalStates:
    """The states of the three generators that belong to no object of the user's, at one moment."""

    def __init__(self) -> None:
        self._states = [(generator, _state(generator)) for generator in _global_generators()]

    def restore(self) -> None:
        """Put the generators back to these states."""
        for generator, state in self._states:
            _set_state(generator, state)


def _numpy_generator() -> Any:
    """Return the generator behind ``numpy.random``'s functions."""
    return vars(np.random)["get_bit_generator"]()  # numpy's annotations do not export the name


def name_of(generator: Any) -> str:
    """Return what a message calls a generator of Python's or NumPy's."""
    if generator is _PYTHON:
        return "Python's random module"
    if generator is _numpy_generator():
        return "numpy.random"
    package = "random" if isinstance(generator, random.Random) else "numpy.random"
    return f"a {package}.{type(generator).__name__} of its own"


# -- where generators are ----------------------------------------------------------------------------------------------


def generators_of(root: torch.nn.Module) -> list[Any]:
    """Return the global generators, and those that the code of `root` can reach.

    These are attributes of modules, of their classes and of objects that they hold, what is bound in functions, and
    globals of the files that the classes and functions are from.
    """
    found = {id(generator): generator for generator in _global_generators()}
    files: dict[int, Mapping[str, Any]] = {}
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = []
    for module in root.modules():
        stack += [(value, 0) for name, value in vars(module).items() if name not in _INTERNAL]
        stack.append((type(module), 0))
    while stack:
        value, depth = stack.pop()
        if not _add_generator(value, found) and id(value) not in seen and depth <= _DEPTH:
            seen.add(id(value))
            stack += [(part, depth + 1) for part in _parts(value, files)]
    for namespace in list(files.values()):
        _search_globals(namespace, found, files)
    return list(found.values())


def _global_generators() -> list[Any]:
    generators = (_PYTHON, _numpy_generator(), torch.default_generator)
    return [generator for generator in generators if generator is not None]


def _search_globals(namespace: Mapping[str, Any], found: dict[int, Any], files: dict[int, Mapping[str, Any]]) -> None:
    """Add the generators among the globals of a file to `found`, and those of files that it has functions from."""
    for value in list(namespace.values()):
        _add_generator(value, found)
        if isinstance(value, FunctionType) and id(value.__globals__) not in files and not _is_foreign_function(value):
            files[id(value.__globals__)] = value.__globals__
            for one in list(value.__globals__.values()):
                _add_generator(one, found)


def _add_generator(value: Any, found: dict[int, Any]) -> bool:
    """Add `value` to `found` if it is a generator with a state, or a method of one; return whether it is."""
    if not isinstance(value, _GENERATORS):
        value = getattr(value, "__self__", None) if type(value).__name__ in _BOUND else None
        if not isinstance(value, _GENERATORS):
            return False
    if not isinstance(value, random.SystemRandom):
        generator = value.bit_generator if isinstance(value, np.random.Generator) else value
        found[id(generator)] = generator
    return True


def _parts(value: Any, files: dict[int, Mapping[str, Any]]) -> Iterable[Any]:
    """Return what an object holds, if code of the user's reaches through it; note the files of code in `files`."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, str, bytes, int, float, type(None))):
        return ()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, dict):
        return list(dict.values(value)) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        return _parts_of_function(value, files)
    if isinstance(value, type):
        return _parts_of_class(value, files)
    kind: type = type(value)
    if not _is_foreign_class(kind) and hasattr(value, "__dict__"):
        return list(vars(value).values())
    return ()


def _parts_of_function(function: FunctionType, files: dict[int, Mapping[str, Any]]) -> Iterable[Any]:
    if _is_foreign_function(function):
        return ()
    files[id(function.__globals__)] = function.__globals__
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            parts.append(cell.cell_contents)
    return parts


def _parts_of_class(kind: type, files: dict[int, Mapping[str, Any]]) -> Iterable[Any]:
    parts: list[Any] = []
    for cls in kind.__mro__:
        if not _is_foreign_class(cls):
            parts += vars(cls).values()
            namespace = vars(sys.modules[cls.__module__])
            files[id(namespace)] = namespace
    return parts


def _is_foreign_function(function: FunctionType) -> bool:
    return is_foreign(function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_foreign_class(kind: type) -> bool:
    """Return True for a class of a library whose objects hold no generators of the user's, or of no file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        return kind.__module__ != "__main__"
    return is_foreign(file)


# -- states ------------------------------------------------------------------------------------------------------------


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        return generator.get_state()
    return generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    else:
        generator.state = state


def _comparable(state: Any) -> Any:
    """Return a state as values that ``==`` compares: NumPy's holds arrays."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, tuple) and any(isinstance(value, np.ndarray) for value in state):
        return tuple(map(_comparable, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state
