"""Records what the Python code of a module reads besides its arguments while it is traced: attributes and globals.

The trace holds for the values that were read. :class:`ort_zero.runtime.export.tracer.Tracer` records;
:mod:`ort_zero.runtime.guards.attribute_guard` compares at each call.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Protocol

import torch

from ort_zero.compat.frames import (
    ADDED_TO,
    FILLED,
    is_augmented_read,
    is_foreign,
    is_installed,
    is_only_filled,
    use_of_read,
    user_line,
)
from ort_zero.compat.impure_calls import is_time
from ort_zero.compat.size_numbers import REPLACED_BUILTINS, with_plain_keys
from ort_zero.compat.torch_modules import BOOKKEEPING, buffer_table, parameter_table, submodule_table, version_of
from ort_zero.compat.value_reads import ValueReadError
from ort_zero.log import get_logger
from ort_zero.runtime.export import attribute_writes
from ort_zero.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CALLABLE,
    CELL,
    DEFAULT,
    GLOBAL,
    ITEM,
    MISSING,
    MODULE,
    Place,
    PlaceFinder,
    attributes_of,
    defaults_of,
    is_number,
    is_plain,
    is_slot,
    same,
)
from ort_zero.runtime.export.callables import place_of
from ort_zero.runtime.export.functions_with_values import (
    CONTAINERS,
    functions_of,
    has_readable_attributes,
    own_global_names,
)
from ort_zero.utils.profile_function import profile_function

MOST_ITEMS = 64
"""Maximum number of items of a container that are compared one by one; a larger one is compared as a whole."""
_INTERNAL = frozenset(vars(torch.nn.Module()))
_CODE = (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType, property, classmethod, staticmethod)


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


class AttributeReads:
    """Records the reads of one trace.

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
        self._enter = enter
        self._plain_key = plain_key
        self.reads: dict[Place, Read] = {}
        """A place comes after that of the object that holds it."""
        self._model = model
        self._running = running
        self._origins = {id(module): Place((MODULE, path)) for path, module in model.named_modules()}
        self._alive: list[Any] = []
        self._known: dict[tuple[int, Any], Place | None] = {}
        """Place of each attribute that was read, by the object's ``id()`` and the name; None if it does not count."""
        self._patched: dict[type, Callable[[], None]] = {}
        self._codes: set[CodeType] = set()
        self._functions = {code: [found] for code, found in functions_of(model)}
        """Functions that hold values, with their places, by their code."""
        self._copies: list[tuple[Place, Any, Any]] = []
        """Place, container and a copy of what it held when it was read."""
        self._called: list[Any] = []
        """Objects among the arguments whose attributes are recorded."""
        for value in callables:
            if isinstance(value, FunctionType):
                self._functions.setdefault(value.__code__, []).append((place_of(value), value))
            elif isinstance(value, CONTAINERS):
                self._copies.append((place_of(value), value, dict(value) if isinstance(value, dict) else list(value)))
            elif id(value) not in self._origins:
                self._origins[id(value)] = place_of(value)
                self._called.append(value)
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

    # -- while the module runs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the code that runs in the block reads."""
        before = _Active.reads
        _Active.reads = self
        try:
            self._patch(torch.nn.Module)
            for value in self._called:
                self._patch(type(value))
            with profile_function(self._entered):
                yield
        finally:
            _Active.reads = before
            for undo in reversed(list(self._patched.values())):
                undo()
            self._patched.clear()

    def _patch(self, kind: type) -> None:
        """Let the instances of a class tell what is read from them, and written to them."""
        if kind in self._patched:
            return
        read: Any = kind.__getattribute__
        write: Any = kind.__setattr__
        delete: Any = kind.__delattr__

        def __getattribute__(obj: Any, name: str) -> Any:
            reads = _Active.reads
            if reads is None or name in _INTERNAL or name.startswith("__"):
                return read(obj, name)
            try:
                value = read(obj, name)
            except AttributeError:
                reads._note_missing(obj, name)
                raise
            try:
                reads._note(obj, name, value)
            except Exception:  # whatever containers of strange classes raise when they are looked at
                get_logger().debug("attribute %s of a %s is not looked at", name, type(obj).__name__, exc_info=True)
            return value

        def __setattr__(obj: Any, name: str, value: Any) -> None:
            reads = _Active.reads
            if reads is not None:
                # what is read from now on was written by the forward itself
                reads._known.setdefault((id(obj), name), None)
                reads._note_write(obj, name)
            write(obj, name, value)

        def __delattr__(obj: Any, name: str) -> None:
            reads = _Active.reads
            if reads is not None:
                reads._known.setdefault((id(obj), name), None)
                reads._note_write(obj, name)
            delete(obj, name)

        patches = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__}
        own = [(name, vars(kind).get(name, MISSING)) for name in patches]
        try:
            for name, method in patches.items():
                type.__setattr__(kind, name, method)
        except TypeError:  # a class of C
            return

        def undo() -> None:
            for name, value in own:
                if value is MISSING:
                    type.__delattr__(kind, name)
                else:
                    type.__setattr__(kind, name, value)

        self._patched[kind] = undo

    def _note_write(self, obj: Any, name: str) -> None:
        origin = self._origins.get(id(obj))
        if origin is None or name in _INTERNAL or BOOKKEEPING.match(name):
            return
        place = origin.then(ATTRIBUTE, name)
        if place not in self._written:
            self._written[place] = (attributes_of(obj) or {}).get(name, MISSING), self._running()

    def _note_missing(self, obj: Any, name: str) -> None:
        origin = self._origins.get(id(obj))
        if origin is None or (id(obj), name) in self._known:
            return
        if isinstance(obj, torch.nn.Module):
            tables = parameter_table(obj), buffer_table(obj), submodule_table(obj)
            if any(dict.__contains__(table, name) for table in tables):
                return  # of what the guard on the module tree knows
        elif hasattr(type(obj), "__getattr__"):
            return
        self._add(origin.then(ATTRIBUTE, name), MISSING)
        self._known[id(obj), name] = origin.then(ATTRIBUTE, name)

    def _note(self, obj: Any, name: str, value: Any) -> None:
        key = (id(obj), name)
        if isinstance(value, CONTAINERS) and use_of_read(sys._getframe(2)) != FILLED:
            self._looked_into.add(id(value))
        if key in self._known:
            place = self._known[key]
            if place is not None:
                self._read_again(place)
            elif key in self._updated and not is_augmented_read(sys._getframe(2)):
                self._add(self._origins[id(obj)].then(ATTRIBUTE, name), self._updated[key][0])
            return
        origin = self._origins.get(id(obj))
        if origin is None:
            return
        place = origin.then(ATTRIBUTE, name)
        if BOOKKEEPING.match(name) or not _is_stored(obj, name):
            place = None
        elif is_number(value) and is_augmented_read(sys._getframe(2)):
            # the value goes into the next one, and perhaps nowhere else
            self._updated[key] = value, use_of_read(sys._getframe(2)) == ADDED_TO
            return
        self._known[key] = place
        if place is not None:
            self._add(place, value)

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
        if is_plain(value) or isinstance(value, (torch.Tensor, *_CODE)) or depth > 8:
            return None
        if id(value) in self._origins:
            self.whole |= {place, self._origins[id(value)]} & self.reads.keys()
            return None
        self._alive.append(value)
        if isinstance(value, (list, tuple, Mapping, collections.deque)):
            self._origins[id(value)] = place
            self._add_items(place, value, depth)
        elif isinstance(value, SimpleNamespace):
            self._origins[id(value)] = place
            for name, part in vars(value).items():
                self._add(place.then(ATTRIBUTE, name), part, depth + 1)
        elif isinstance(value, functools.partial):
            self._origins[id(value)] = place
            for name in ("func", "args", "keywords"):
                self._add(place.then(ATTRIBUTE, name), getattr(value, name), depth + 1)
        elif isinstance(value, torch.nn.Module):
            self._origins[id(value)] = place  # hidden from the tree in a plain container
        elif has_readable_attributes(value):
            self._origins[id(value)] = place
            self._patch(type(value))
        return None

    def _add_items(self, place: Place, value: Any, depth: int) -> None:
        keys = list(value) if isinstance(value, Mapping) else range(len(value))
        if isinstance(value, (list, dict, collections.deque)):
            self._copies.append((place, value, dict(value) if isinstance(value, dict) else list(value)))
        if len(value) > MOST_ITEMS or not all(map(is_plain, keys)):
            return
        for key in keys:
            self._add(place.then(ITEM, key), value[key], depth + 1)

    def _entered(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the globals that a function reads, before it runs."""
        code = frame.f_code
        if event != "call" or code in self._codes or _Active.reads is not self:
            return
        self._codes.add(code)
        if is_foreign(code.co_filename) or code.co_filename.startswith("<"):
            return
        self._enter(frame.f_globals)
        name = frame.f_globals.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not None and vars(module) is frame.f_globals:
            self._note_globals(code, module)
        for place, function in self._functions.get(code, ()):
            self._note_closure(place, function)

    def _note_globals(self, code: CodeType, module: ModuleType) -> None:
        users = not is_installed(code.co_filename)
        found, attributes = own_global_names(code)
        root = Place((GLOBAL, module.__name__))
        for name in sorted(found & vars(module).keys()):
            value = vars(module)[name]
            if name in REPLACED_BUILTINS and callable(value):
                continue
            if isinstance(value, CONTAINERS) and not is_only_filled(code, name):
                self._looked_into.add(id(value))
            if isinstance(value, ModuleType):
                if users and _is_users(value):
                    for other in sorted(attributes & vars(value).keys()):
                        self._note_global(Place((GLOBAL, value.__name__), ((ITEM, other),)), vars(value)[other], True)
            elif isinstance(value, type) and users:
                for other in sorted(attributes):
                    part = next((vars(cls)[other] for cls in value.__mro__ if other in vars(cls)), MISSING)
                    if part is not MISSING and (is_plain(part) or isinstance(part, (list, dict, torch.Tensor))):
                        self._add(root.then(ITEM, name).then(ATTRIBUTE, other), part)
            else:
                self._note_global(root.then(ITEM, name), value, users)

    def _note_global(self, place: Place, value: Any, users: bool) -> None:
        counts = is_plain(value) or users and not isinstance(value, (*_CODE, torch.nn.Module)) and (
            isinstance(value, (torch.Tensor, list, tuple, dict, SimpleNamespace)) or has_readable_attributes(value)
        )  # fmt: skip
        if counts and not place.steps[-1][1].startswith("__"):
            self._add(place, value)

    def _note_closure(self, place: Place, function: Any) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not set yet
                value = cell.cell_contents
                if not isinstance(value, (*_CODE, torch.nn.Module)):
                    self._note_use(function, name, value)
                    self._add(place.then(CELL, name), value)
        for name, value in defaults_of(function).items():
            if isinstance(value, CONTAINERS):
                self._note_use(function, name, value)
                self._add(place.then(DEFAULT, name), value)

    def _note_use(self, function: Any, name: str, value: Any) -> None:
        if isinstance(value, CONTAINERS) and not is_only_filled(function.__code__, name):
            self._looked_into.add(id(value))

    # -- afterwards ------------------------------------------------------------------------------------------------

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
                module = read.readers[0] if read.readers else None
                name = place.named(type(self._model).__name__)
                changed[place] = ValueReadError(module, f"reads {name}, and changes it for the next call", read.line)
            elif not (place in self._written or is_plain(value) and is_plain(read.value)):
                self._leave_out(place)
        if changed:
            raise AttributeChangedError(changed)
        self._note_assigned(written)

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
            now = list(container) if type(container) is collections.deque else container
            carried = _items_among(inputs, place)  # these are written one by one
            if carried:
                now = dict(now) if isinstance(now, dict) else list(now)
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
            if isinstance(value, (*_CODE, torch.nn.Module)):
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
            if not attribute_writes.same_items(
                list(container) if type(container) is collections.deque else container, copy
            )
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


class _Active:
    reads: AttributeReads | None = None


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing of what runs in the block: PyTorch runs it at each call."""
    before, _Active.reads = _Active.reads, None
    try:
        yield
    finally:
        _Active.reads = before


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS)


def _is_stored(obj: Any, name: str) -> bool:
    """Return whether an attribute is a value that the object, or its class, holds; no method, nothing computed."""
    own = attributes_of(obj)
    if own is not None and name in own:
        return True
    for cls in type(obj).__mro__:
        if name in vars(cls):
            value = vars(cls)[name]
            return is_slot(value) or not (isinstance(value, _CODE) or hasattr(type(value), "__get__"))
    return False


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_foreign(file) and not is_installed(file)


def _items_among(places: Collection[Place], container: Place) -> set[Any]:
    """Return the keys of those items of a container that are among `places`."""
    return {place.steps[-1][1] for place in places if place.steps and place.holder == container}
