"""What the Python code of a module has read and written while it was traced, and what follows from that.

:class:`.runtime.export.attribute_reads.AttributeReads` records; :meth:`AttributeRecord.finish` tells what the
graph holds for, what each of its runs writes, and what the graph cannot hold.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat.frames import user_line
from ort_zero.ortmodule.compat.impure_calls import is_time
from ort_zero.ortmodule.compat.size_numbers import with_plain_keys
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export import attribute_writes
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CALLABLE,
    GLOBAL,
    ITEM,
    MISSING,
    MODULE,
    Place,
    PlaceFinder,
    attributes_of,
    is_number,
    is_plain,
    same,
)
from ort_zero.ortmodule.runtime.export.functions_with_values import CONTAINERS, has_readable_attributes
from ort_zero.ortmodule.utils.containers import UNORDERED, holds, items_held

MOST_ITEMS = 64
"""Maximum number of items of a container that are compared one by one; a larger one is compared as a whole."""
CODE = (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType, property, classmethod, staticmethod)
"""Types of attributes that are code, and of which no value is recorded."""

CACHED_FUNCTION = type(functools.lru_cache(int))


@dataclass(slots=True)
class Read:
    """What Python code has read at one place while it was traced."""

    value: Any
    readers: list[torch.nn.Module] = field(default_factory=list)
    """The innermost modules that ran when the value was read."""
    line: str = ""
    """``FILE:LINE in FUNCTION`` of the first read of a number or a tensor."""
    version: int = 0
    """How often a tensor had been changed in place."""


class AttributeChangedError(BaseException):
    """A forward reads numbers or tensors that it changes for the next call.

    Not an Exception: no ``except`` of a model may take it for one of its own.

    Args:
        reads: the reads, by the places of the attributes.
    """

    def __init__(self, reads: Mapping[Place, ValueReadError]):
        super().__init__("; ".join(map(str, reads.values())))
        self.reads = dict(reads)


class StartValuesError(BaseException):
    """The forward decides by what it has left behind, and its first run in an export has changed that already.

    Not an Exception: no ``except`` of a model may take it for one of its own.

    Args:
        places: attributes and containers that must have their values of the call when the forward is traced.
    """

    def __init__(self, places: Collection[Place]):
        super().__init__("the forward decides by what it has left behind")
        self.places = frozenset(places)


class ValuesBefore(Protocol):
    """The attributes at the time of the call for which a module is traced."""

    def value_at(self, place: Place) -> Any:
        """Return the value of an attribute, or the copy of what a container held; MISSING if there was none."""

    def values_at(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """Yield each of `places` with the value of :meth:`value_at`."""

    def number_type(self, place: Place) -> type | None:
        """Return the type of an attribute that is a number when PyTorch runs the module, None for all else."""


class AttributeRecord:
    """The reads and writes of one trace.

    Args:
        model: the user's module.
        running: returns the innermost module that runs, None outside of all.
        plain_key: returns a key of a dict with Python numbers in the place of sizes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        running: Callable[[], torch.nn.Module | None],
        plain_key: Callable[[Any], Any] = lambda key: key,
    ):
        self._plain_key = plain_key
        self.reads: dict[Place, Read] = {}
        """A place comes after that of the object that holds it."""
        self._model = model
        self._running = running
        self._origins = {id(module): Place((MODULE, path)) for path, module in model.named_modules()}
        self._alive: list[Any] = []
        self._copies: list[tuple[Place, Any, Any]] = []
        """Place, container and a copy of what it held when it was read."""
        self._unordered: list[tuple[Place, Any, Any]] = []
        """The same of containers whose items have no places: sets, arrays, bytes that change."""
        self._updated: dict[tuple[int, str], tuple[Any, bool]] = {}
        """Numbers that an augmented assignment takes, and whether it adds, by the object's ``id()`` and the name."""
        self._looked_into: set[int] = set()
        """``id()`` of the containers of which the code does more than to fill them."""
        self._written: dict[Place, tuple[Any, torch.nn.Module | None]] = {}
        """Attributes that the forward writes: the value before, and the innermost module that ran."""
        self.changes: list[attribute_writes.Change] = []
        """The changes that the forward makes; those that are inputs of the graph are left out."""
        self.times: list[Place] = []
        """Attributes that the forward gives times that it has measured; no run takes as long."""
        self._before: ValuesBefore | None = None
        self.kinds: set[Place] = set()
        """Places of tensors of which only the kind counts: the trace has no use for their values."""
        self.whole: set[Place] = set()
        """Places of objects that were read at several places."""

    def _patch(self, kind: type) -> None:
        """Let the instances of a class tell what is read from them."""
        raise NotImplementedError

    def _note_code(self, place: Place, value: Any) -> None:
        """Record what functions that were found at a place read when they run."""
        raise NotImplementedError

    def _follow(self, value: Any, place: Place | None = None) -> None:
        """Record from now on what a function reads, or what is read from an object."""
        raise NotImplementedError

    def _note_entries(self, place: Place, function: Any) -> None:
        """Record the results that a function with ``functools.lru_cache`` has cached."""
        raise NotImplementedError

    # -- while the module runs -------------------------------------------------------------------------------------

    def _read_again(self, place: Place) -> None:
        read = self.reads.get(place)
        module = self._running()
        if read is not None and module is not None and all(module is not other for other in read.readers):
            read.readers.append(module)

    def _add(self, place: Place, value: Any, depth: int = 0) -> None:
        """Note a value that was read for the first time, and where the parts of it can be found."""
        if place in self.reads:
            return self._read_again(place)
        module = self._running()
        read = self.reads[place] = Read(value, [module] if module is not None else [])
        if is_number(value) or isinstance(value, torch.Tensor):
            read.line = user_line()
            read.version = version_of(value) if isinstance(value, torch.Tensor) else 0
        if isinstance(value, CODE):
            self._note_code(place, value)
        if is_plain(value) or isinstance(value, (torch.Tensor, *CODE)) or depth > 8:
            return None
        if id(value) in self._origins:
            self.whole |= {place, self._origins[id(value)]} & self.reads.keys()
            return None
        self._alive.append(value)
        if isinstance(value, (list, tuple, Mapping, collections.deque)):
            self._origins[id(value)] = place
            self._add_items(place, value, depth)
        elif isinstance(value, UNORDERED):
            self._origins[id(value)] = place
            self._unordered.append((place, value, items_held(value)))
        elif isinstance(value, (SimpleNamespace, threading.local)):
            self._origins[id(value)] = place
            for name, part in list(vars(value).items()):
                self._add(place.then(ATTRIBUTE, name), part, depth + 1)
        elif isinstance(value, functools.partial):
            self._origins[id(value)] = place
            for name in ("func", "args", "keywords"):
                self._add(place.then(ATTRIBUTE, name), getattr(value, name), depth + 1)
        elif isinstance(value, weakref.ref):
            target = value()
            if has_readable_attributes(target) and not isinstance(target, torch.nn.Module):
                self._follow(target)
        elif isinstance(value, CACHED_FUNCTION):
            self._note_entries(place, value)
        elif isinstance(value, torch.nn.Module):
            self._origins[id(value)] = place  # hidden from the tree in a plain container
        elif has_readable_attributes(value):
            self._origins[id(value)] = place
            self._patch(type(value))
        return None

    def _add_items(self, place: Place, value: Any, depth: int) -> None:
        held: Any = value
        if isinstance(value, (list, dict, collections.deque)):
            held = items_held(value)
            self._copies.append((place, value, held))
            if id(value) in self._looked_into:
                self._look_into(value)
        keys = list(held) if isinstance(held, Mapping) else range(len(held))
        if len(keys) > MOST_ITEMS or not all(map(is_plain, keys)):
            return
        for key in keys:
            item = value[key]
            # what a class of containers builds for each read is another object at each step
            if item is held[key] or is_plain(item):
                self._add(place.then(ITEM, key), item, depth + 1)

    def _look_into(self, container: Any) -> None:
        """Note that the code does more with a container, and with those in it, than to fill it."""
        stack = [container]
        while stack:
            held = stack.pop()
            self._looked_into.add(id(held))
            if isinstance(held, CONTAINERS) and len(held) <= MOST_ITEMS:
                items = items_held(held)
                stack += [
                    item
                    for item in (items.values() if isinstance(items, dict) else items)
                    if isinstance(item, CONTAINERS) and id(item) not in self._looked_into
                ]

    # -- when it has ended -----------------------------------------------------------------------------------------

    def finish(
        self,
        known: Collection[Place] = (),
        used: Collection[int] = (),
        before: ValuesBefore | None = None,
        by_value: Collection[Place] = (),
    ) -> None:
        """Note what the forward has changed, and leave out of the reads what it has only filled.

        Args:
            known: attributes whose changes are known: they are inputs of the graph, or do not count.
            used: ``id()`` of the tensors that the trace has a use for.
            before: knows the attributes at the time of the call; None if the forward did not run in between.
            by_value: numbers that the forward changes for the next call, and of which the graph holds for one value.

        Raises:
            StartValuesError: what the forward reads and writes was something else at the time of the call.
            AttributeChangedError: the forward reads numbers or tensors, and changes them for the next call.
        """
        for _, container, _ in self._copies:
            plain = with_plain_keys(container, self._plain_key) if isinstance(container, dict) else None
            if plain is not None:
                container.clear()
                container.update(plain)
        finder = PlaceFinder(self._model)
        written = [
            (place, value)
            for place, value, container, _ in finder.find(list(self._written))
            if place not in known and not isinstance(container, MappingProxyType)  # what a property computes
        ]
        self._before = before
        for place, value in written:
            if is_time(value):  # a measured time is nobody's to compute with, and no run takes as long
                self._leave_out(place)
                self.times.append(place)
        written = [(place, value) for place, value in written if not is_time(value)]
        self._note_updates(dict(written))
        if before is not None:
            self._compare_start(dict(written), before, known, finder)
        self._note_filled(known)
        changed: dict[Place, ValueReadError] = {}
        reads = dict(self.reads)
        for place, value, _, _ in finder.find(reads):
            read = reads[place]
            tensors = isinstance(value, torch.Tensor) and isinstance(read.value, torch.Tensor)
            if place in known or value is read.value and not (tensors and version_of(value) != read.version):
                continue
            if place in by_value:
                continue
            if tensors and value is not read.value and id(read.value) not in used:
                self.kinds.add(place)  # such as "is not None"
            elif place.root[0] in (MODULE, GLOBAL, CALLABLE) and (
                tensors or self._is_other_number(place, read.value, value)
            ):
                changed[place] = self._changed_read(place)
                changed[place].moves = self._moves(place) if tensors else self._changes_length(place, finder)
            elif not (is_plain(read.value) and (is_plain(value) or self._decides(place)) or place in self._written):
                self._leave_out(place)
        for place in self._moved_containers():
            changed[place] = self._changed_read(place)
            changed[place].moves = True
        if changed:
            raise AttributeChangedError(changed)
        self._note_assigned(written)

    def _changed_read(self, place: Place) -> ValueReadError:
        read = self.reads.get(place)
        module = read.readers[0] if read is not None and read.readers else None
        name = place.named(type(self._model).__name__)
        return ValueReadError(module, f"reads {name}, and changes it for the next call", read.line if read else "")

    def _moved_containers(self) -> Iterator[Place]:
        """Yield the containers that no graph can carry over: what they hold has no places, or other places now."""
        for place, container, copy in self._unordered:
            if not holds(container, copy):
                yield place
        for place, container, copy in self._copies:
            if isinstance(copy, dict) and id(container) in self._looked_into:
                now = list(items_held(container))
                if [key for key in now if key in copy] != [key for key in copy if key in now]:
                    yield place

    def _moves(self, place: Place) -> bool:
        """Return whether an item belongs to a list of which the forward moves tensors to other indices."""
        for copy_of, container, copy in self._copies:
            if copy_of == place.holder and isinstance(copy, list):
                before = {id(item): i for i, item in enumerate(copy) if isinstance(item, torch.Tensor)}
                return any(before.get(id(item), i) != i for i, item in enumerate(container))
        return False

    def _changes_length(self, place: Place, finder: PlaceFinder) -> bool:
        """Return whether an item belongs to a list that is shorter or longer for the next call."""
        now = finder.value_at(place.holder)
        lists = [copy for copy_of, _, copy in self._copies if copy_of == place.holder and isinstance(copy, list)]
        return any(isinstance(now, (list, collections.deque)) and len(now) != len(copy) for copy in lists)

    def _decides(self, place: Place) -> bool:
        """Return whether an item belongs to a container of which the code does more than to fill it."""
        return any(copy_of == place.holder and id(held) in self._looked_into for copy_of, held, _ in self._copies)

    def _compare_start(
        self, written: Mapping[Place, Any], before: ValuesBefore, inputs: Collection[Place], finder: PlaceFinder
    ) -> None:
        """Raise if the trace has started from other values than the call; inputs of the graph do not count.

        What was not there at the call, such as a table that a module computes once, does not count either.
        """
        at_start = before.value_at
        others = []
        unwritten = [
            place
            for place, now, _, _ in finder.find(self.reads)
            if now is self.reads[place].value and place not in written and place not in inputs
        ]
        for place, then in before.values_at(unwritten):
            now = self.reads[place].value
            if is_plain(then) and (now is MISSING or is_plain(now)) and not same(now, then):
                others.append(place)
        for place in written:
            if place in self.reads:
                now, then = self.reads[place].value, at_start(place)
                alike = any(is_kind(now) and is_kind(then) for is_kind in (is_number, _is_tensor, _is_container))
                if not (now is then or alike or is_plain(now) and is_plain(then) and now == then):
                    others.append(place)
        for place, container, copy in self._copies:
            if id(container) in self._looked_into and id(container) in self.changed_containers():
                then = at_start(place)
                if _is_container(then) and not attribute_writes.same_items(
                    copy, then, without=_items_among(inputs, place)
                ):
                    others.append(place)
        if others:
            raise StartValuesError(others)

    def _note_updates(self, written: Mapping[Place, Any]) -> None:
        """Count as reads of numbers those assignments that do more than to add a number to them."""
        for (owner, name), (before, adds) in self._updated.items():
            place = self._origins[owner].then(ATTRIBUTE, name)
            if place in written and not (adds and self._is_number(place, written[place])):
                self._add(place, before)

    def _note_filled(self, inputs: Collection[Place]) -> None:
        for place, container, copy in self._copies:
            now = items_held(container)
            carried = _items_among(inputs, place)  # these are written one by one
            if carried:
                for key in carried.intersection(range(len(now)) if isinstance(now, list) else now):
                    if isinstance(copy, dict) and key in copy or isinstance(copy, list) and key < len(copy):
                        now[key] = copy[key]
            if attribute_writes.same_items(now, copy):
                continue
            how, value = attribute_writes.container_change(place, now if carried else container, copy)
            self.changes.append(attribute_writes.Change(place, how, value))
            if id(container) not in self._looked_into:
                self._leave_out(place)

    def _note_assigned(self, written: Sequence[tuple[Place, Any]]) -> None:
        for place, value in written:
            before, module = self._written[place]
            if value is MISSING:
                if before is not MISSING:
                    self.changes.append(attribute_writes.Change(place, attribute_writes.DELETE, None, module))
                continue
            if isinstance(value, (*CODE, torch.nn.Module)):
                continue
            adds = self._is_added_to(place) and self._is_number(place, value) and place not in self.reads
            how, value = (attribute_writes.ADD, value - before) if adds else (attribute_writes.SET, value)
            self.changes.append(attribute_writes.Change(place, how, value, module))

    def _is_other_number(self, place: Place, before: Any, now: Any) -> bool:
        if not is_number(before) or not self._is_number(place, now):
            return False
        return isinstance(now, torch.Tensor) or now != before

    def _is_number(self, place: Place, value: Any) -> bool:
        """Return whether PyTorch gives an attribute a number; one that is computed from sizes is a tensor here."""
        if isinstance(value, torch.Tensor):
            return self._before is not None and self._before.number_type(place) is not None
        return is_number(value)

    def _is_added_to(self, place: Place) -> bool:
        return any(
            adds and self._origins[owner].then(ATTRIBUTE, name) == place
            for (owner, name), (_, adds) in self._updated.items()
        )

    def written_names(self) -> set[tuple[int, str]]:
        """Return what the forward has written: ``id()`` of the dict of an object's attributes, and the name."""
        finder, found = PlaceFinder(self._model), set()
        for place in self._written:
            own = attributes_of(finder.value_at(place.holder))
            if own is not None:
                found.add((id(own), place.steps[-1][1]))
        return found

    def changed_containers(self) -> dict[int, tuple[Any, Any]]:
        """Return the containers that the forward has changed, with what they held when it first saw them."""
        return {
            id(container): (container, copy)
            for _, container, copy in self._copies
            if not attribute_writes.same_items(container, copy)
        }

    @property
    def held_before(self) -> set[int]:
        """``id()`` of the tensors that changed containers held before."""
        copies = [copy for _, copy in self.changed_containers().values()]
        items = [item for copy in copies for item in (copy.values() if isinstance(copy, dict) else copy)]
        return {id(item) for item in items if isinstance(item, torch.Tensor)}

    def _leave_out(self, place: Place) -> None:
        depth = len(place.steps)
        for other in list(self.reads):
            if other.root == place.root and other.steps[:depth] == place.steps:
                del self.reads[other]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS)


def _items_among(places: Collection[Place], container: Place) -> set[Any]:
    """Return the keys of those items of a container that are among `places`."""
    return {place.steps[-1][1] for place in places if place.steps and place.holder == container}
