"""Puts back what an export does to attributes and containers: it runs the forward twice, and each run writes them.

What only the first run makes, such as a table that a module computes once, stays: the trace holds it as a constant.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch

from ort_zero.compat.frames import is_foreign, is_installed
from ort_zero.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CELL,
    ITEM,
    MISSING,
    MODULE,
    CellsOf,
    Place,
    PlaceFinder,
    attributes_of,
    defaults_of,
    is_plain,
    step_into,
)
from ort_zero.runtime.export.attribute_records import MOST_ITEMS, AttributeChangedError, AttributeRecord
from ort_zero.runtime.export.functions_with_values import CONTAINERS, functions_of, has_readable_attributes

_INTERNAL = frozenset(vars(torch.nn.Module()))
_DEPTH = 4
"""Number of containers and objects through which values are looked for, from an attribute of a module on."""


class AttributeState:
    """The attributes of all modules of a model, and the contents of containers, at one moment.

    Args:
        model: the user's module.
        callables: functions, and objects that are called, among the arguments; see :mod:`.callables`.
    """

    def __init__(self, model: torch.nn.Module, callables: Iterable[Any] = ()):
        self._model = model
        self._number_types: dict[tuple[int, str], type] = {}
        self._attributes: dict[int, tuple[dict, dict]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._modules = {path: vars(module) for path, module in model.named_modules()}
        self._owners: dict[int, str] = {}
        """Path of the module that holds each container."""
        for path, own in self._modules.items():
            self._path = path
            self._take_attributes(own, 0, without=_INTERNAL)
        self._variables: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Plain values of globals and of the variables around functions, by the ``id()`` of what holds them."""
        self._path = ""
        for name in {type(module).__module__ for module in model.modules()}:
            source = sys.modules.get(name)
            file = getattr(source, "__file__", None) or ""
            if source is None or (file and (is_foreign(file) or is_installed(file))):
                continue
            self._note_variables(vars(source), vars(source), vars(source))
            for value in vars(source).values():
                if isinstance(value, (list, dict, collections.deque)):
                    self._take(value, 1)
        for _, function in dict(functions_of(model)).values():
            self._take_function(function)
        for value in callables:
            if isinstance(value, FunctionType):
                self._take_function(value)
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
        known = self._variables.get(id(holder)) if kind in (ITEM, CELL) else None
        if known is not None and key in known[1]:
            value = known[1][key]
        elif kind == ITEM:
            container = self._containers.get(id(holder))
            items = container[1] if container is not None else holder
            value = step_into(items, kind, key)[0]
        else:
            own = attributes_of(holder)
            attributes = self._attributes.get(id(own))
            value = attributes[1].get(key, MISSING) if attributes is not None else step_into(holder, kind, key)[0]
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
                    _refill(*container)

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
        contents = None if reads is None else reads.changed_containers()
        for container, copy in self._containers.values():
            inside = _is_below(self._owners[id(container)], in_torch)
            if contents is None or inside or id(container) in contents:
                _refill(container, copy)
        for container, copy in (contents or {}).values():
            if id(container) not in self._containers:
                _refill(container, copy)
        for variables, values in self._variables.values():
            for name, value in values.items():
                with contextlib.suppress(LookupError, ValueError):
                    if variables[name] is not value and is_plain(variables[name]):
                        variables[name] = value

    def _take_function(self, function: Any) -> None:
        """Take what the variables around a function, and the defaults of its parameters, hold."""
        names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in names if cell != CellType()}
        for value in (*variables.values(), *defaults_of(function).values()):
            if isinstance(value, CONTAINERS):
                self._take(value, 1)
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
        if isinstance(value, (list, dict, collections.deque)):
            self._owners[id(value)] = self._path
            self._containers[id(value)] = value, (dict(value) if isinstance(value, dict) else list(value))
        if isinstance(value, (list, tuple, dict, collections.deque)):
            if len(value) <= MOST_ITEMS:
                for item in value.values() if isinstance(value, dict) else value:
                    self._take(item, depth + 1)
        elif isinstance(value, SimpleNamespace) or (
            not isinstance(value, (torch.Tensor, torch.nn.Module, type)) and has_readable_attributes(value)
        ):
            own = attributes_of(value)
            if own is not None:
                self._take_attributes(own, depth + 1)


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        same = container.keys() == copy.keys() and all(container[key] is value for key, value in copy.items())
    else:
        same = len(container) == len(copy) and all(a is b for a, b in zip(container, copy, strict=True))
    if same:
        return
    container.clear()
    if isinstance(container, dict):
        container.update(copy)
    else:
        container.extend(copy)


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
            if place in places:
                own[name] = tensor
                with torch.no_grad():
                    tensor.copy_(copy)
