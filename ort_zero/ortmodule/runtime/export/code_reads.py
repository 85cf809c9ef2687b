"""Records what the functions that a traced module calls read besides attributes.

Globals, the variables of the functions around a function, default values, context variables, variables of the
environment; and the functions themselves, which a program may replace. :mod:`.attribute_reads` adds the attributes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ort_zero.ortmodule.compat import environment, torch_settings
from ort_zero.ortmodule.compat.frames import attribute_chains, is_foreign, is_installed, is_only_filled, is_standard
from ort_zero.ortmodule.compat.size_numbers import REPLACED_BUILTINS
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CACHED,
    CELL,
    CONTEXT,
    DEFAULT,
    ENVIRONMENT,
    GLOBAL,
    ITEM,
    MISSING,
    SETTING,
    Place,
    attributes_of,
    defaults_of,
    entries_of,
    is_plain,
)
from ort_zero.ortmodule.runtime.export.attribute_records import (
    CACHED_FUNCTION,
    CODE,
    MOST_ITEMS,
    AttributeRecord,
    Read,
)
from ort_zero.ortmodule.runtime.export.callables import callables_in, hooks_of, place_of
from ort_zero.ortmodule.runtime.export.class_reads import ClassReads, place_of_class
from ort_zero.ortmodule.runtime.export.functions_with_values import (
    CONTAINERS,
    has_readable_attributes,
    has_values,
    methods_of,
    own_global_names,
)
from ort_zero.ortmodule.utils.containers import items_held

_VALUES = (torch.Tensor, np.ndarray, weakref.ref, list, tuple, dict, SimpleNamespace)
"""Types of globals whose values count besides plain ones and objects with attributes."""
_MOST_MODULES = 4
"""Number of modules through which a name is looked for: ``package.part.settings.SCALE``."""


class CodeReads(AttributeRecord):
    """Records what functions read while one trace is made.

    Args:
        model: the user's module.
        running: returns the innermost module that runs, None outside of all.
        enter: called with the globals of each function of the user's before it runs.
        plain_key: returns a key of a dict with Python numbers in the place of sizes.
        callables: functions, and objects that are called, among the arguments; see :mod:`.callables`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        running: Callable[[], torch.nn.Module | None],
        enter: Callable[[dict[str, Any]], None] = lambda names: None,
        plain_key: Callable[[Any], Any] = lambda key: key,
        callables: Iterable[Any] = (),
    ):
        super().__init__(model, running, plain_key)
        self._enter = enter
        self._codes: set[CodeType] = set()
        self._methods: dict[CodeType, tuple[Place, Any]] = {}
        self._functions: dict[CodeType, list[tuple[Place, Any]]] = {}
        """Functions that hold values, with their places, by their code."""
        self._called: list[Any] = []
        """Objects outside of the model whose attributes are recorded."""
        self._followed: set[int] = set()
        self._marked = [p for p in model.parameters() if any(n[0] != "_" and n[:3] != "ds_" for n in vars(p))]
        """Weights with attributes that are not DeepSpeed's."""
        self._classes = ClassReads(self._add, self._look_into)
        for place, value, function in methods_of(model):
            self._methods.setdefault(function.__code__, (place, value))
            if has_values(function):
                place = place if value is function else place_of(function)
                self._functions.setdefault(function.__code__, []).append((place, function))
        for value in hooks_of(model):
            self._follow(value)
        for value in callables:
            self._follow(value)

    # -- functions, and the objects that they belong to ------------------------------------------------------------

    def _follow(self, value: Any, place: Place | None = None) -> None:
        """Record from now on what a function reads, or what is read from an object.

        Args:
            value: the function or object.
            place: where it was found; None for no place but its own name.
        """
        if id(value) in self._followed and not (place is not None and isinstance(value, FunctionType)):
            return
        self._followed.add(id(value))
        if isinstance(value, FunctionType):
            if has_values(value) or place is not None:
                known = self._functions.setdefault(value.__code__, [])
                if all(function is not value for _, function in known):
                    known.append((place or place_of(value), value))
                    if value.__code__ in self._codes:
                        self._note_function(*known[-1])
        elif isinstance(value, functools.partial):
            for part in (*value.args, *value.keywords.values()):
                if isinstance(part, CONTAINERS):
                    self._look_into(part)
            for name in ("args", "keywords"):
                self._add(place_of(value).then(ATTRIBUTE, name), getattr(value, name), 1)
        elif isinstance(value, CONTAINERS):
            self._alive.append(value)
            if id(value) not in self._origins:
                self._copies.append((place_of(value), value, items_held(value)))
        elif id(value) not in self._origins:
            self._origins[id(value)] = place_of(value)
            self._called.append(value)
            self._patch(type(value))

    def _note_code(self, place: Place, value: Any) -> None:
        if isinstance(value, type):
            self._classes.in_reach(value)
            return
        if isinstance(value, FunctionType) and not is_foreign(value.__code__.co_filename):
            self._follow(value, place)
        for found in callables_in([value]):
            self._follow(found)

    def _happened(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note what a function reads before it runs, and whose attributes may be read of what it returns."""
        if event == "call":
            self._entered(frame)
        elif event == "return":
            if has_readable_attributes(argument) and not is_foreign(frame.f_code.co_filename):
                self._patch(type(argument))
        elif event == "c_call" and argument in torch_settings.READS:
            if torch_settings.asked_by_user(frame):
                self._add(Place((SETTING, "")).then(ITEM, torch_settings.READS[argument]), argument())
        elif event == "c_call" and type(getattr(argument, "__self__", None)) is ContextVar:
            if argument.__name__ == "get" and not is_foreign(frame.f_code.co_filename):
                variable = argument.__self__
                self._add(place_of(variable).then(CONTEXT, variable.name), variable.get(MISSING))

    def _entered(self, frame: FrameType) -> None:
        code = frame.f_code
        if code is environment.LOOKUP:
            return self._note_environment(frame)
        if code in torch_settings.RANKS:
            if torch_settings.asked_by_user(frame.f_back):
                asked = torch_settings.RANKS[code]
                self._add(Place((SETTING, "")).then(ITEM, asked), torch_settings.Settings()[asked])
            return None
        if code in self._codes:
            return None
        if is_foreign(code.co_filename) or code.co_filename.startswith("<"):
            if torch_settings.is_of_layers(code):  # what a layer calls may be replaced as well
                self._codes.add(code)
                self._note_functions_of_torch(code, frame.f_globals)
            return None
        self._codes.add(code)
        self._classes.entered(code)
        self._classes.note_weights(code, self._marked)
        self._note_functions_of_torch(code, frame.f_globals)
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, type):
            self._note_class(code, first)
        elif isinstance(first, torch.nn.Module):
            if "type" in code.co_names or "__class__" in code.co_names:
                self._note_class(code, type(first))
        elif has_readable_attributes(first):
            self._patch(type(first))
        self._enter(frame.f_globals)
        name = frame.f_globals.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not None and vars(module) is frame.f_globals:
            self._note_globals(code, module)
        if code in self._methods:
            self._add(*self._methods[code])
        for place, function in list(self._functions.get(code, ())):
            self._note_function(place, function)
        return None

    def _note_function(self, place: Place, function: Any) -> None:
        """Note a function that runs: what it has from the functions around it, and what may be replaced in it."""
        if place.steps:
            self._add(place, function)
        self._note_closure(place, function)

    def _note_closure(self, place: Place, function: Any) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not set yet
                value = cell.cell_contents
                if isinstance(value, type):
                    self._note_class(function.__code__, value)
                elif isinstance(value, CODE):
                    self._note_code(place.then(CELL, name), value)
                elif not isinstance(value, torch.nn.Module):
                    self._note_use(function, name, value)
                    self._add(place.then(CELL, name), value)
        for name, value in defaults_of(function).items():
            if isinstance(value, CONTAINERS):
                self._note_use(function, name, value)
                self._add(place.then(DEFAULT, name), value)

    def _note_use(self, function: Any, name: str, value: Any) -> None:
        if isinstance(value, CONTAINERS) and not is_only_filled(function.__code__, name):
            self._look_into(value)

    # -- globals ---------------------------------------------------------------------------------------------------

    def _note_globals(self, code: CodeType, module: ModuleType) -> None:
        users = not is_installed(code.co_filename)
        found, attributes = own_global_names(code)
        root = Place((GLOBAL, module.__name__))
        for name in sorted(found & vars(module).keys()):
            value = vars(module)[name]
            if name in REPLACED_BUILTINS and callable(value):
                continue
            if isinstance(value, CONTAINERS) and not is_only_filled(code, name):
                self._look_into(value)
            if isinstance(value, ModuleType):
                self._note_module(code, value, attributes, users)
            elif isinstance(value, type) and users:
                self._add(root.then(ITEM, name), value)
                self._note_class(code, value)
            else:
                self._note_global(root.then(ITEM, name), value, users, attributes)
        for name in sorted(attributes & sys.modules.keys()):  # imported by the function
            self._note_module(code, sys.modules[name], attributes, users)

    def _note_module(self, code: CodeType, source: ModuleType, names: set[str], users: bool, depth: int = 0) -> None:
        """Note what a function reads from another module of the user's."""
        if not users or not _is_users(source) or depth > _MOST_MODULES:
            return
        for name in sorted(names & vars(source).keys()):
            value = vars(source)[name]
            if isinstance(value, ModuleType):
                self._note_module(code, value, names, users, depth + 1)
            elif isinstance(value, type):
                self._classes.in_reach(value)
            else:
                if isinstance(value, CONTAINERS) and not is_only_filled(code, name, attribute=True):
                    self._look_into(value)
                self._note_global(Place((GLOBAL, source.__name__), ((ITEM, name),)), value, True, names)

    def _note_functions_of_torch(self, code: CodeType, names: dict[str, Any]) -> None:
        """Record the functions of torch that a function calls by name: a program may replace them."""
        for name, path in attribute_chains(code):
            value, root, key = names.get(name), names.get("__name__"), name
            while isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch" and path:
                root, key, path = value.__name__, path[0], path[1:]
                value = vars(value).get(key)
            is_function = isinstance(value, (FunctionType, BuiltinFunctionType))
            of_torch = (getattr(value, "__module__", None) or "torch").partition(".")[0] == "torch"
            known = is_function and isinstance(root, str) and vars(sys.modules.get(root, sys)).get(key) is value
            if isinstance(root, str) and known and (of_torch or root.partition(".")[0] == "torch"):
                self._add(Place((GLOBAL, root), ((ITEM, key),)), value)

    def _note_global(self, place: Place, value: Any, users: bool, attributes: set[str]) -> None:
        if isinstance(value, FunctionType):
            if not is_foreign(value.__code__.co_filename):
                self._add(place, value)
                for name in sorted(attributes & vars(value).keys()):
                    if name != "__wrapped__":
                        self._add(place.then(ATTRIBUTE, name), vars(value)[name])
        elif isinstance(value, CACHED_FUNCTION):
            self._note_cached(value)
            if users:
                self._note_entries(place, value)
        elif users and isinstance(value, (functools.partial, threading.local)):
            self._add(place, value)
        counts = is_plain(value) or users and not isinstance(value, (*CODE, torch.nn.Module)) and (
            isinstance(value, _VALUES) or has_readable_attributes(value)
        )  # fmt: skip
        if counts and not place.steps[-1][1].startswith("__"):
            self._add(place, value)

    def _note_class(self, code: CodeType, kind: type) -> None:
        """Note the attributes that a function reads from a class that is its first argument, or its object's."""
        if not is_foreign(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
            self._classes.in_reach(kind)
            self._classes.note(code, kind)

    def _is_changed_class_attribute(self, obj: Any, name: str, value: Any) -> bool:
        """Return whether an attribute is its class's, was read from the class before, and has been changed there."""
        if name in (attributes_of(obj) or ()):
            return False
        read = self.reads.get(place_of_class(type(obj)).then(ATTRIBUTE, name))
        return read is not None and read.value is not value

    def _note_entries(self, place: Place, function: Any) -> None:
        """Record the results that a function with ``functools.lru_cache`` has: a program may clear them."""
        entries = entries_of(function)
        if len(entries) <= MOST_ITEMS:
            module = self._running()
            for key, entry in list(entries.items()):
                if _is_key(key):
                    self.reads.setdefault(place.then(CACHED, key), Read(entry, [module] if module is not None else []))

    def _note_cached(self, function: Any) -> None:
        """Record what is read from the objects that a function with ``functools.lru_cache`` has returned."""
        for held in gc.get_referents(function):
            if not isinstance(held, dict):
                continue
            for entry in list(held.values()):
                for value in (entry, *(gc.get_referents(entry) if type(entry).__name__ == "_lru_list_elem" else ())):
                    if isinstance(value, SimpleNamespace):
                        self._alive.append(value)
                        for name, part in vars(value).items():
                            self._add(place_of(value).then(ATTRIBUTE, name), part)
                    elif isinstance(value, (list, dict)) and value is not held:
                        self._look_into(value)
                        self._alive.append(value)
                        self._origins.setdefault(id(value), place_of(value))
                        self._add_items(place_of(value), value, 0)
                    elif has_readable_attributes(value):
                        self._follow(value)

    def _note_environment(self, frame: FrameType) -> None:
        name = frame.f_locals.get("key")
        caller: FrameType | None = frame.f_back
        while caller is not None and _is_standard(caller.f_code.co_filename):
            caller = caller.f_back
        if isinstance(name, str) and caller is not None and not is_foreign(caller.f_code.co_filename):
            value = environment.Environment(MISSING)[name]
            self._add(Place((ENVIRONMENT, "")).then(ITEM, name), value)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen ") or is_standard(file)


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_foreign(file) and not is_installed(file)


def _is_key(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(is_plain(part) or isinstance(part, torch.nn.Module) for part in parts)
