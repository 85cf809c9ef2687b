"""Names the places outside of a call's arguments where Python code finds values: attributes, items, globals.

The recorder of reads (:mod:`.attribute_reads`) makes them while a module is traced; the guard
(:mod:`ort_zero.ortmodule.runtime.guards.attribute_guard`) looks there at each call; the export cache stores them.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ort_zero.ortmodule.compat.environment import Environment
from ort_zero.ortmodule.compat.torch_settings import Settings
from ort_zero.ortmodule.runtime.export.named_objects import value_named

ATTRIBUTE, ITEM, CELL, DEFAULT, CONTEXT = "attribute", "item", "cell", "default", "context"
CACHED = "cached"
MODULE, GLOBAL, ARGUMENT, CALLABLE, ENVIRONMENT = "module", "global", "argument", "callable", "environment"
SETTING = "setting"
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""The value of an attribute that is not there."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
         torch.memory_format, slice, range, type(...))  # fmt: skip
"""Types whose instances do not change, and are compared by type and value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A place where Python code finds a value: names and keys that lead there from a module."""

    root: tuple[str, str]
    """``("module", path in the module tree)``, ``("global", name of a Python module)``, ``("argument", "")`` for
    ``(args, kwargs)`` of a call, ``("callable", name)`` for a function or an object that exists in this process,
    ``("environment", "")`` for the environment variables, or ``("setting", "")`` for the settings of PyTorch."""
    steps: tuple[tuple[str, Any], ...] = ()
    """(kind, key) of each step: ``("attribute", "config")``, ``("item", "temperature")``, ``("cell", "scale")``."""

    def then(self, kind: str, key: Any) -> Place:
        """Return the place that lies one step further."""
        return Place(self.root, (*self.steps, (kind, key)))

    @property
    def holder(self) -> Place:
        """The place of the object that holds the value."""
        return Place(self.root, self.steps[:-1])

    def named(self, model: str) -> str:
        """Return a name for people: ``"Model.temperature"``, ``"encoder.layer.0.dropout.p"``, ``"train.SCALE"``.

        Args:
            model: name of the class of the model.
        """
        kind, start = self.root
        text = start or {MODULE: model, ARGUMENT: "argument ", ENVIRONMENT: "os.environ", SETTING: "torch"}.get(
            kind, ""
        )
        text = text.partition(":")[0] if kind == CALLABLE else text
        for step, key in self.steps:
            plain = step == ATTRIBUTE or (kind == GLOBAL and text == start)
            if step == CACHED:
                text += " (cached)"
                continue
            text += f".{key}" if plain else f" ({key})" if step in (CELL, DEFAULT, CONTEXT) else f"[{key!r}]"
        return text

    def as_input(self, model: str) -> str:
        """Return the name of the graph input that stands for the value."""
        return "ort_zero_" + re.sub(r"\W+", "_", self.named(model)).strip("_")


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change, and is compared by type and value."""
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset, torch.Size) and all(map(is_plain, value))
    return type(value) in PLAIN or isinstance(value, (enum.Enum, np.generic))


def is_number(value: Any) -> bool:
    """Return whether a value is a number that is no bool and not complex; NumPy's scalars are numbers, too."""
    return type(value) in (int, float) or isinstance(value, (np.floating, np.integer))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorState:
    """The value of an attribute that is a tensor: the tensor, and how often it was changed in place."""

    tensor: torch.Tensor
    version: int
    wanted: bool = False
    """Whether it requires grad."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The value of an attribute that is a container, whose parts have places of their own."""

    kind: type
    keys: tuple
    """The keys of a mapping in their order; (length,) of a sequence; () for an object with attributes."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The value of an attribute that is a large container of plain values, or a set."""

    copy: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FunctionState:
    """A function of the user's: the function, and what a program may replace in it."""

    function: Any
    code: Any
    defaults: tuple
    """Default values of the parameters; of iterators, in whose places an export has other objects, the class."""
    keywords: tuple

    @staticmethod
    def of(function: Any) -> FunctionState:
        """Return the state of a function now."""
        keywords = function.__kwdefaults__ or {}
        return FunctionState(
            function,
            function.__code__,
            tuple(map(_default, function.__defaults__ or ())),
            tuple((name, _default(value)) for name, value in keywords.items()),
        )


def _default(value: Any) -> Any:
    return value.__class__ if hasattr(value, "__next__") else value


def same(one: Any, other: Any) -> bool:
    """Return whether two values of one place make equal graphs."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, TensorState):
        return one.tensor is other.tensor and (one.version, one.wanted) == (other.version, other.wanted)
    if isinstance(one, Contents):
        return one.kind is other.kind and one.keys == other.keys
    if isinstance(one, FunctionState):
        same_code = one.function is other.function and one.code is other.code
        return same_code and same(one.defaults, other.defaults) and same(one.keywords, other.keywords)
    if isinstance(one, Snapshot):
        return type(one.copy) is type(other.copy) and bool(one.copy == other.copy)
    if type(one) in (tuple, torch.Size):
        return len(one) == len(other) and all(map(same, one, other))
    if not is_plain(one):
        return False
    return one == other or (one != one and other != other)


def shown(value: Any) -> str:
    """Return a value in a word or two."""
    if isinstance(value, TensorState):
        return "a tensor"
    if isinstance(value, Contents):
        return f"a {value.kind.__name__} of {list(value.keys)}"[:60] if value.keys else f"a {value.kind.__name__}"
    if isinstance(value, Snapshot):
        if isinstance(value.copy, tuple):
            return f"an array of {list(value.copy[1])}"
        return f"a {type(value.copy).__name__} of {len(value.copy)} values"
    if is_plain(value) or value is MISSING:
        return repr(value)[:60]
    if isinstance(value, FunctionState):
        given = (*value.defaults, *value.keywords)
        return f"a function with the default values {given}"[:60] if given else "a function"
    return f"a {type(value).__name__}" if not isinstance(value, type) else value.__name__


MISSING_STEP = (MISSING, None, None)


def step_into(holder: Any, kind: str, key: Any) -> tuple[Any, Any, Any]:
    """Return the value one step away from `holder`, and container and key by which it can be looked up again.

    The container is None if there is no such value.
    """
    if kind == ITEM:
        try:
            return holder[key], holder, key
        except (KeyError, IndexError, TypeError):
            return MISSING_STEP
    if kind in (CELL, DEFAULT):
        variables = CellsOf(holder) if kind == CELL else DefaultsOf(holder)
        try:
            return variables[key], variables, key
        except (KeyError, ValueError, AttributeError):
            return MISSING_STEP
    if kind == CACHED:
        entries = entries_of(holder)
        return (entries[key], entries, key) if key in entries else MISSING_STEP
    if kind == CONTEXT:
        variable = ContextOf(holder)
        return variable[key], variable, key
    if isinstance(holder, type):
        owner = next((cls for cls in holder.__mro__ if key in vars(cls)), None)
        return MISSING_STEP if owner is None else (vars(owner)[key], ClassAttributes(owner), key)
    own = attributes_of(holder)
    if own is not None and key in own:
        return own[key], own, key
    for cls in type(holder).__mro__:
        if key in vars(cls):
            value = vars(cls)[key]
            if is_slot(value):
                slots = SlotsOf(holder)
                return (slots[key], slots, key) if hasattr(holder, key) else MISSING_STEP
            return value, vars(cls), key
    return MISSING_STEP


def entries_of(function: Any) -> dict[Any, Any]:
    """Return the very dict in which a function with ``functools.lru_cache`` keeps its results, by their arguments."""
    results = (value for value in gc.get_referents(function) if type(value) is dict and value is not vars(function))
    return next(results, {})


def dict_behind(container: Any) -> Any:
    """Return the very dict of a class's attributes in place of the view that ``vars`` makes anew at each call.

    Look-ups in it take a third of the time, and two of them can be seen to be one. Anything else is returned as it is.
    """
    if type(container) is not MappingProxyType:
        return container
    tables = [table for table in gc.get_referents(container) if type(table) is dict]
    return tables[0] if len(tables) == 1 else container


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the very dict of an object's attributes, None if it has none."""
    if isinstance(value, threading.local):
        return value.__dict__  # that of the thread that asks
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def is_slot(value: Any) -> bool:
    """Return whether a class attribute stands for an entry of ``__slots__``."""
    return type(value).__name__ == "member_descriptor"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotsOf:
    """Looks up the attributes of an object that has ``__slots__`` as items."""

    owner: Any

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self.owner, name)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ClassAttributes:
    """Looks up and sets the attributes of a class as items."""

    owner: type

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CellsOf:
    """Looks up the variables that a function has from the functions around it as items."""

    function: Any

    def __getitem__(self, name: str) -> Any:
        function = self.function
        return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        function = self.function
        function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ContextOf:
    """Looks up the value of a context variable, by its name, as an item."""

    variable: ContextVar

    def __getitem__(self, name: str) -> Any:
        return self.variable.get(MISSING)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DefaultsOf:
    """Looks up and sets the default values of a function's parameters as items."""

    function: Any

    def __getitem__(self, name: str) -> Any:
        return defaults_of(self.function)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        function = self.function
        if name in (function.__kwdefaults__ or {}):
            function.__kwdefaults__[name] = value
            return
        names = [key for key in defaults_of(function) if key not in (function.__kwdefaults__ or {})]
        function.__defaults__ = tuple(
            value if key == name else old for key, old in zip(names, function.__defaults__, strict=True)
        )


def defaults_of(function: Any) -> dict[str, Any]:
    """Return the default value of each parameter of a function that has one, by its name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


_environment = Environment(MISSING)
_settings = Settings()


class PlaceFinder:
    """Finds the values at places of one model.

    Args:
        model: the user's module.
    """

    def __init__(self, model: torch.nn.Module):
        self._modules = dict(model.named_modules())
        self.call: tuple[tuple, dict] = (), {}
        """Arguments of the call that runs."""

    def root_of(self, place: Place) -> Any:
        """Return the object that a place starts from, MISSING if it is gone."""
        kind, name = place.root
        if kind == MODULE:
            return self._modules.get(name, MISSING)
        if kind == ARGUMENT:
            return self.call
        if kind == ENVIRONMENT:
            return _environment
        if kind == SETTING:
            return _settings
        if kind == CALLABLE:
            value = value_named(name)
            return MISSING if value is None else value
        return vars(sys.modules[name]) if name in sys.modules else MISSING

    def find(self, places: Sequence[Place] | Mapping[Place, Any]) -> Iterator[tuple[Place, Any, Any, Any]]:
        """Yield (place, value, container, key) of each place; a place comes after the one that holds it."""
        found: dict[Place, Any] = {}
        for place in places:
            holder = place.holder
            if holder not in found:
                found[holder] = self._value(holder, found)
            value, container, key = MISSING_STEP
            if found[holder] is not MISSING:
                value, container, key = step_into(found[holder], *place.steps[-1])
            found[place] = value
            yield place, value, container, key

    def holders(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """Yield each place with the object that holds its value, MISSING if there is none; places without one not."""
        found: dict[Place, Any] = {}
        for place in places:
            if place.steps:
                yield place, self._value(place.holder, found)

    def value_at(self, place: Place) -> Any:
        """Return the value at one place, MISSING if there is none."""
        return self._value(place, {})

    def _value(self, place: Place, found: dict[Place, Any]) -> Any:
        if not place.steps:
            return self.root_of(place)
        if place.holder not in found:
            found[place.holder] = self._value(place.holder, found)
        holder = found[place.holder]
        return holder if holder is MISSING else step_into(holder, *place.steps[-1])[0]
