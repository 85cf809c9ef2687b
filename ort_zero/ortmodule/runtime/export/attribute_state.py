"""Puts back what an export does to attributes and containers: it runs the forward twice, and each run writes them.

What only the first run makes, such as a table that a module computes once, stays: the trace holds it as a constant.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.compat.torch_modules import forward_hook_tables
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CELL,
    ITEM,
    MISSING,
    MODULE,
    CellsOf,
    ClassAttributes,
    Place,
    PlaceFinder,
    attributes_of,
    defaults_of,
    is_plain,
    step_into,
)
from ort_zero.ortmodule.runtime.export.attribute_records import MOST_ITEMS, AttributeChangedError, AttributeRecord
from ort_zero.ortmodule.runtime.export.callables import callables_of
from ort_zero.ortmodule.runtime.export.functions_with_values import CONTAINERS, has_readable_attributes, methods_of
from ort_zero.ortmodule.utils.containers import UNORDERED, items_held, put_back

_INTERNAL = frozenset(vars(torch.nn.Module()))
_DEPTH = 4
"""Number of containers and objects through which values are looked for, from an attribute of a module on."""
_MOST_MODULES = 256
"""Maximum number of modules of the user's whose globals are taken."""


class AttributeState:
    """The attributes of all modules of a model, and the contents of containers, at one moment.

    Args:
        model: the user's module.
        callables: functions, and objects that are called, among the arguments; see :mod:`.callables`.
        most_items: containers with more items are not copied; None for no limit.
    """

    def __init__(self, model: torch.nn.Module, callables: Iterable[Any] = (), most_items: int | None = None):
        self._model = model
        self._most_items = most_items
        self._number_types: dict[tuple[int, str], type] = {}
        self._attributes: dict[int, tuple[dict, dict]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._modules = {path: vars(module) for path, module in model.named_modules()}
        self._functions: set[int] = set()
        """``id()`` of the functions whose variables were taken."""
        self._owners: dict[int, str] = {}
        """Path of the module that holds each container."""
        for path, own in self._modules.items():
            self._path = path
            self._take_attributes(own, 0, without=_INTERNAL)
        self._hooks = [
            (path, table, items_held(table))
            for path, module in model.named_modules() for table in forward_hook_tables(module)
        ]  # fmt: skip
        self._variables: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Plain values of globals and of the variables around functions, by the ``id()`` of what holds them."""
        self._path = ""
        self._seen_modules: set[str] = set()
        for name in {type(module).__module__ for module in model.modules()}:
            self._take_module(sys.modules.get(name))
        for kind in {type(module) for module in model.modules()}:
            self._take_classes(kind)
        for _, _, function in methods_of(model):
            self._take_function(function)
            for name in function.__code__.co_names:
                if isinstance(value := function.__globals__.get(name, sys.modules.get(name)), ModuleType):
                    self._take_module(value)
                elif isinstance(value, type):
                    self._take_classes(value)
                elif _is_users_object(value):
                    self._take(value, 1)
        for value in chain(callables_of(model), callables):
            if isinstance(value, FunctionType):
                self._take_function(value)
            elif isinstance(value, functools.partial):
                for part in (*value.args, *value.keywords.values()):
                    self._take(part, 1)
            elif isinstance(value, CONTAINERS):
                self._take(value, 0)
            elif (own := attributes_of(value)) is not None:
                self._take_attributes(own, 0)

    def note_numbers(self) -> None:
        """Note which attributes are Python numbers at the moment, after a run that nobody traced."""
        self._number_types = {
            (id(own), name): type(value)
            for own, _ in self._attributes.values()
            for name, value in own.items()
            if type(value) in (int, float)
        }

    def number_type(self, place: Place) -> type | None:
        """Return the type of an attribute that was a number at :meth:`note_numbers`, None for all else."""
        own = attributes_of(PlaceFinder(self._model).value_at(place.holder))
        return self._number_types.get((id(own), place.steps[-1][1])) if own is not None else None

    def value_at(self, place: Place) -> Any:
        """Return the value of an attribute at that moment, of a container a copy; MISSING if there was none."""
        if not place.steps:
            container = self._containers.get(id(PlaceFinder(self._model).value_at(place)))
            return container[1] if container is not None else MISSING
        return self._value_in(PlaceFinder(self._model).value_at(place.holder), place)

    def values_at(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """Yield each place with the value of :meth:`value_at`."""
        for place, holder in PlaceFinder(self._model).holders(places):
            yield place, self._value_in(holder, place)

    def _value_in(self, holder: Any, place: Place) -> Any:
        kind, key = place.steps[-1]
        known = self._variables.get(id(holder)) if kind in (ITEM, CELL) or isinstance(holder, type) else None
        if known is not None and key in known[1]:
            value = known[1][key]
        elif kind == ITEM:
            container = self._containers.get(id(holder))
            items = container[1] if container is not None else holder
            value = step_into(items, kind, key)[0]
        else:
            own = attributes_of(holder)
            attributes = self._attributes.get(id(own))
            if attributes is None:
                value = step_into(holder, kind, key)[0]
            else:
                of_class = (vars(cls)[key] for cls in type(holder).__mro__ if key in vars(cls))
                value = attributes[1][key] if key in attributes[1] else next(of_class, MISSING)
        copy = self._containers.get(id(value))
        return copy[1] if copy is not None else value

    def put_back(self, places: Collection[Place]) -> None:
        """Give attributes and containers their values of that moment."""
        finder = PlaceFinder(self._model)
        for place in sorted(places, key=lambda place: len(place.steps)):
            kind, key = place.steps[-1] if place.steps else ("", "")
            own = attributes_of(finder.value_at(place.holder)) if kind == ATTRIBUTE else None
            attributes = self._attributes.get(id(own))
            if own is not None and attributes is not None:
                if place.root[0] == MODULE and own.get(key, MISSING) is not attributes[1].get(key, MISSING):
                    self._put_back_hooks([place.root[1]])
                if key in attributes[1]:
                    own[key] = attributes[1][key]
                else:
                    own.pop(key, None)
            known = self._variables.get(id(finder.value_at(place.holder))) if place.steps else None
            if known is not None and key in known[1]:
                known[0][key] = known[1][key]
            inside = kind == ITEM
            for value in (finder.value_at(place), *([finder.value_at(place.holder)] if inside else ())):
                container = self._containers.get(id(value))
                if container is not None:
                    put_back(*container)

    def restore(self, reads: AttributeRecord | None, in_torch: Collection[str]) -> None:
        """Put back what a trace has written, all plain attributes, and all attributes of some submodules.

        Args:
            reads: the trace; None to put everything back.
            in_torch: paths of submodules that PyTorch runs at each step, which write for themselves.
        """
        changed = None if reads is None else reads.written_names()
        whole = {id(own) for path, own in self._modules.items() if _is_below(path, in_torch)}
        for own, before in self._attributes.values():
            for name in {**before, **own}:
                if name in _INTERNAL or (name in before and name in own and own[name] is before[name]):
                    continue
                plain = name in before and is_plain(before[name]) and is_plain(own.get(name, before))
                written = changed is None or id(own) in whole or (id(own), name) in changed
                if name in before and (plain or written):
                    own[name] = before[name]
                elif written:
                    own.pop(name, None)
        self._put_back_hooks([""] if reads is None else in_torch)
        contents = None if reads is None else reads.changed_containers()
        for container, copy in self._containers.values():
            inside = _is_below(self._owners[id(container)], in_torch)
            if contents is None or inside or id(container) in contents:
                put_back(container, copy)
        for container, copy in (contents or {}).values():
            if id(container) not in self._containers:
                put_back(container, copy)
        for variables, values in self._variables.values():
            for name, value in values.items():
                with contextlib.suppress(LookupError, ValueError):
                    if variables[name] is not value and is_plain(variables[name]):
                        variables[name] = value

    def _put_back_hooks(self, paths: Collection[str]) -> None:
        """Leave modules the forward hooks of that moment: beside a hook goes an attribute that tells that it is there.

        Args:
            paths: those of the modules and of all below them; ``""`` is the model.
        """
        for path, table, hooks in self._hooks:
            if "" in paths or _is_below(path, paths):
                put_back(table, hooks)

    def _take_module(self, source: ModuleType | None) -> None:
        """Take what the globals of a module of the user's hold, and those of modules from which it has its names."""
        file = getattr(source, "__file__", None) or ""
        if source is None or source.__name__ in self._seen_modules or len(self._seen_modules) > _MOST_MODULES:
            return
        if (file and (is_foreign(file) or is_installed(file))) or not (file or source.__name__ == "__main__"):
            return
        self._seen_modules.add(source.__name__)
        self._note_variables(vars(source), vars(source), vars(source))
        for value in list(vars(source).values()):
            if isinstance(value, (list, dict, collections.deque, *UNORDERED)):
                self._take(value, 1)
            elif isinstance(value, ModuleType):
                self._take_module(value)
            elif isinstance(value, type):
                self._take_classes(value)
            elif isinstance(value, FunctionType):
                self._take_module(sys.modules.get(value.__module__ or ""))

    def _take_classes(self, kind: type) -> None:
        """Take what attributes of the user's classes hold, from `kind` on."""
        for cls in kind.__mro__:
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
            if id(cls) in self._variables or is_foreign(file) or is_installed(file):
                continue
            self._take_module(sys.modules.get(cls.__module__))
            values = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
            self._note_variables(cls, ClassAttributes(cls), values)
            for value in values.values():
                if isinstance(value, type):
                    self._take_classes(value)
                elif isinstance(value, (*CONTAINERS, *UNORDERED)) or _is_users_object(value):
                    self._take(value, 1)

    def _take_function(self, function: Any) -> None:
        """Take what the variables around a function, and the defaults of its parameters, hold."""
        if id(function) in self._functions:
            return
        self._functions.add(id(function))
        names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in names if cell != CellType()}
        for value in (*variables.values(), *defaults_of(function).values()):
            if isinstance(value, CONTAINERS) or _is_users_object(value):
                self._take(value, 1)
            elif isinstance(value, type):
                self._take_classes(value)
            elif isinstance(value, FunctionType) and not is_foreign(value.__code__.co_filename):
                self._take_function(value)
        self._note_variables(function, CellsOf(function), variables)

    def _note_variables(self, owner: Any, variables: Any, values: dict[str, Any]) -> None:
        plain = {name: value for name, value in values.items() if is_plain(value)}
        if plain:
            self._variables[id(owner)] = variables, plain

    def _take_attributes(self, own: dict, depth: int, without: Collection[str] = ()) -> None:
        if id(own) in self._attributes:
            return
        copy = {name: value for name, value in own.items() if name not in without}
        self._attributes[id(own)] = own, copy
        for value in copy.values():
            self._take(value, depth)

    def _take(self, value: Any, depth: int) -> None:
        if id(value) in self._containers or depth > _DEPTH or is_plain(value):
            return
        if isinstance(value, (list, dict, collections.deque, *UNORDERED)):
            if self._most_items is not None and len(value) > self._most_items:
                return
            self._owners[id(value)] = self._path
            self._containers[id(value)] = value, items_held(value)
        if isinstance(value, (list, tuple, dict, collections.deque)):
            if len(value) <= MOST_ITEMS:
                for item in items_held(value).values() if isinstance(value, dict) else value:
                    self._take(item, depth + 1)
        elif isinstance(value, SimpleNamespace) or (
            not isinstance(value, (torch.Tensor, torch.nn.Module, type)) and has_readable_attributes(value)
        ):
            own = attributes_of(value)
            if own is not None:
                self._take_attributes(own, depth + 1)


def _is_users_object(value: Any) -> bool:
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return not is_installed(file) and has_readable_attributes(value)


def _is_below(path: str, others: Collection[str]) -> bool:
    return any(f"{path}.".startswith(f"{other}.") for other in others)


@contextlib.contextmanager
def unchanged_attributes(
    module: torch.nn.Module,
    inputs: Collection[Place] = (),
    trace: Callable[[], AttributeRecord | None] = lambda: None,
    in_torch: Collection[str] = (),
    callables: Iterable[Any] = (),
) -> Iterator[AttributeState]:
    """Put back what the trace in the block writes; after an error, everything.

    The values of tensors are put back where they are inputs of the graph, or are about to become inputs.

    Args:
        module: the user's module.
        inputs: attributes that are inputs of the graph.
        trace: returns what was recorded of the trace, None if there is nothing.
        in_torch: paths of submodules that PyTorch runs inside the graph.
        callables: functions, and objects that are called, among the arguments.

    Yields:
        The state at the start.
    """
    state = AttributeState(module, callables)
    tensors = [
        (own, name, value, value.detach().clone(), Place((MODULE, path)).then(ATTRIBUTE, name))
        for path, own in ((path, vars(child)) for path, child in module.named_modules())
        for name, value in own.items() if isinstance(value, torch.Tensor)
    ]  # fmt: skip
    places = set(inputs)
    reads = None
    try:
        yield state
        reads = trace()
    except AttributeChangedError as error:
        places.update(error.reads)
        raise
    finally:
        state.restore(reads, in_torch)
        for own, name, tensor, copy, place in tensors:
            if place in places or _is_below(place.root[1], in_torch):
                own[name] = tensor
                with torch.no_grad():
                    tensor.copy_(copy)
