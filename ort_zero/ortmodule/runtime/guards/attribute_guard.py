"""Guard on attributes: notices at each call whether what Python code read during a trace is still what it was.

The recorder (:mod:`.runtime.export.attribute_reads`) says which attributes, items and globals a graph was
traced with. All of them are looked up in a few passes in C, without a walk over the module tree; only where an
object is another one than at the last call are values compared. Hooks and methods that are replaced on an instance
count for all modules of the tree.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat.frames import is_foreign
from ort_zero.ortmodule.compat.object_checks import checks
from ort_zero.ortmodule.compat.torch_modules import hook_tables, is_complex, is_infrastructure
from ort_zero.ortmodule.runtime.export.attribute_inputs import put
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    MISSING,
    Contents,
    FunctionState,
    Place,
    PlaceFinder,
    Snapshot,
    TensorState,
    dict_behind,
    is_number,
    is_plain,
    same,
    shown,
)
from ort_zero.ortmodule.runtime.export.attribute_records import MOST_ITEMS
from ort_zero.ortmodule.runtime.export.attribute_writes import AttributeWrite
from ort_zero.ortmodule.runtime.export.functions_with_values import ITERATORS, has_readable_attributes
from ort_zero.ortmodule.utils.containers import UNORDERED, items_held

HOOKS, METHODS = Place(("hooks", "")), Place(("methods", ""))
"""Stand for the hooks of all modules of the tree, and for the methods that are replaced on their instances."""
_BYTES = operator.methodcaller("tobytes")
MOST_BYTES = 2**24
"""Maximum size of a NumPy array, in bytes, whose contents are compared; 16 MiB take a millisecond."""
_DEFINITION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
MOST_COPIED = 100_000
"""Maximum number of items of a container that is compared as a whole."""


class AttributeValues:
    """The values of all attributes that are looked at, at the time of a call.

    Args:
        values: value of each attribute.
        before: the values of an earlier call.
        changed: the only attributes that have changed since `before`.
    """

    __slots__ = ("after", "changed", "token", "values")

    def __init__(
        self, values: Mapping[Place, Any], before: AttributeValues | None = None, changed: Iterable[Place] = ()
    ):
        self.values = values
        self.token = object()
        self.after = before.token if before is not None else None
        self.changed = tuple(changed)


class InputKind:
    """Stands for any value of one kind: the graph takes it as an input.

    Args:
        value: a number, or the state of a tensor.
    """

    __slots__ = ("kind",)

    def __init__(self, value: Any):
        self.kind = _kind(value)

    def takes(self, value: Any) -> bool:
        """Return whether a value can be the input's."""
        return self.kind == (value.kind if isinstance(value, InputKind) else _kind(value))


def _kind(value: Any) -> tuple:
    if isinstance(value, (TensorState, torch.Tensor)):
        tensor = value.tensor if isinstance(value, TensorState) else value
        return "tensor", tensor.dtype, tensor.dim(), tensor.requires_grad
    if is_number(value):
        return ("int" if isinstance(value, (int, np.integer)) else "float",)
    return (type(value).__name__,)


class ReadValues:
    """The values that a graph was traced with.

    Args:
        values: value of each attribute.
        inputs: name of the graph input of each attribute whose value the graph takes at each run.
        readers: paths of the modules that read an attribute; "" stands for the model itself.
        whole: places of objects that were read at several places: another object counts as a change.
        model: name of the model's class, for messages.
        kinds: places of tensors of which only the kind counts.
    """

    __slots__ = ("_held", "_token", "inputs", "kinds", "model", "readers", "values", "whole")

    def __init__(
        self,
        values: Mapping[Place, Any],
        inputs: Mapping[Place, str] | None = None,
        readers: Mapping[Place, Sequence[str]] | None = None,
        whole: Iterable[Place] = (),
        model: str = "",
        kinds: Iterable[Place] = (),
    ):
        self.kinds = frozenset(place for place in kinds if place in values)
        self.inputs = {place: name for place, name in (inputs or {}).items() if place in values}
        self.readers = dict(readers or {})
        self.whole = frozenset(whole)
        self.model = model
        self.values = {**values, **{place: InputKind(values[place]) for place in (*self.inputs, *self.kinds)}}
        self._token: object | None = None
        """Stands for the values that :meth:`hold` has looked at last."""
        self._held = False

    def hold(self, now: AttributeValues | ReadValues) -> bool:
        """Return whether the graph computes what the module computes with the values `now`."""
        if isinstance(now, ReadValues):
            return now.values.keys() == self.values.keys() and not any(True for _ in self._differing(now.values))
        if now.token is not self._token:
            near = self._held and now.after is self._token is not None
            places = [place for place in now.changed if place in self.values] if near else self.values
            self._held = not any(True for _ in self._differing(now.values, places))
            self._token = now.token
        return self._held

    def differing(self, now: AttributeValues | ReadValues) -> list[Place]:
        """Return the attributes that have other values now."""
        return list(self._differing(now.values))

    def reasons(self, now: AttributeValues | ReadValues) -> list[str]:
        """Describe each attribute that has another value now."""
        found = []
        for place in self._differing(now.values):
            if place == HOOKS:
                found.append(_hook_reason(self.values[place], now.values.get(place, ())))
                continue
            if place == METHODS:
                found.append("a method of a module was replaced")
                continue
            before, after = self.values[place], now.values.get(place, MISSING)
            old = f"a {before.kind[0]}" if isinstance(before, InputKind) else shown(before)
            name = place.named(self.model)
            if old == shown(after):
                found.append(f"{name} was changed ({old})")
            else:
                found.append(f"{name} changed from {old} to {shown(after)}")
        return found

    def _differing(self, now: Mapping[Place, Any], places: Iterable[Place] | None = None) -> Iterator[Place]:
        for place in self.values if places is None else places:
            value, other = self.values[place], now.get(place, MISSING)
            if isinstance(value, InputKind):
                if not value.takes(other):
                    yield place
            elif not _equal(value, other):
                yield place


NOTHING_READ = ReadValues({})
"""For a graph whose trace read no attribute."""
NO_VALUES = AttributeValues({})


class AttributeGuard:
    """Looks up the attributes that the graphs of one model were traced with.

    Args:
        module: the user's module.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._places: dict[Place, None] = {}
        self._whole: set[Place] = set()
        self._current = NO_VALUES
        self._stale = True
        self._tree = 0
        self._values: list[Any] = []
        self._own: set[int] = set()
        """``id()`` of the parameters and buffers, inputs of every graph: only their identity counts."""

    def watch(
        self,
        readers: Mapping[Place, Sequence[str]],
        inputs: Mapping[Place, str],
        whole: Iterable[Place],
        kinds: Iterable[Place] = (),
    ) -> ReadValues:
        """Look from now on at what a graph was traced with; return the values.

        Args:
            readers: paths of the modules that read an attribute. A place comes after that of the object that holds it.
            inputs: see :class:`ReadValues`.
            whole: see :class:`ReadValues`.
            kinds: see :class:`ReadValues`.
        """
        self._places.update(dict.fromkeys(readers))
        self._whole.update(whole)
        self._stale = True
        now = self.check().values
        values = {place: now[place] for place in (*readers, HOOKS, METHODS)}
        return ReadValues(values, inputs, readers, whole, type(self._module).__name__, kinds)

    def value(self, place: Place) -> Any:
        """Return the number or tensor at a place, as of the last check."""
        value = self._current.values[place]
        return value.tensor if isinstance(value, TensorState) else value

    def write(
        self,
        writes: Sequence[AttributeWrite],
        outputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        call: tuple[tuple, dict],
    ) -> None:
        """Write what a run of the graph has computed for attributes and containers, those of the caller too.

        Args:
            writes: in the order of the forward.
            outputs: outputs of the graph.
            given: tensors of the call's arguments.
            call: positional and keyword arguments of the call.
        """
        self._finder.call = call
        try:
            for write in writes:
                write.carry_out(self._finder, outputs, given)
        finally:
            self._finder.call = (), {}

    def assign(self, place: Place, value: torch.Tensor, in_place: bool) -> None:
        """Give an attribute the value that a run of the graph has computed for it.

        Args:
            place: an input of the graph.
            value: a tensor; becomes a number where the attribute is one.
            in_place: whether the forward changes the tensor that the attribute is.
        """
        before = self.value(place)
        if in_place:
            before.copy_(value)
        else:
            put(self._finder, place, value if isinstance(before, torch.Tensor) else value.item())

    def check(self, tree: int | None = None) -> AttributeValues:
        """Return the values now: the same object as before if none has changed.

        Args:
            tree: number of the version of the module tree; None for that of the last check.
        """
        if tree is not None and tree != self._tree:
            self._tree, self._stale = tree, True
        if self._stale or not (self._same_shape() and (self._unchanged() or self._update())):
            self._look()
        return self._current

    def _same_shape(self) -> bool:
        """Return whether nothing but single values can have changed."""
        try:
            return (
                self._checks.have_lengths(self._sized, self._lengths)
                and list(map(version_of, self._tensors)) == self._versions
                and self._checks.requires_grad(self._tensors) == self._wanted
                and self._copied == self._copies
                and list(map(_DEFINITION, self._functions)) == self._definitions
                and list(map(_BYTES, self._arrays)) == self._bytes
            )
        except (ValueError, AttributeError, RuntimeError, TypeError):
            return False

    def _unchanged(self) -> bool:
        try:
            return self._checks.are_same(self._containers, self._keys, self._values)
        except (LookupError, ValueError, AttributeError):
            return False

    def _update(self) -> bool:
        """Take over values that have changed; return False if more than plain values has."""
        try:
            found = list(map(operator.getitem, self._containers, self._keys))
        except (LookupError, ValueError, AttributeError):
            return False
        changed: dict[Place, Any] = {}
        for i, (value, before) in enumerate(zip(found, self._values, strict=True)):
            if value is not before:
                places = self._entries[i]
                if not places or not (is_plain(value) and is_plain(before)):
                    return False
                if not same(value, before):
                    changed.update(dict.fromkeys(places, value))
        self._values = found
        if changed:
            self._current = AttributeValues({**self._current.values, **changed}, self._current, changed)
        return True

    def _look(self) -> None:
        """Look at every place, and remember how to do it fast."""
        self._stale = False
        self._checks = checks()
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._values = []
        self._entries: list[list[Place]] = []
        """Places of each value, several if modules share their class or configuration; none for hooks and methods."""
        self._copied: list[Any] = []
        self._copies: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._functions: list[Any] = []
        self._arrays: list[np.ndarray] = []
        # a complex buffer is no input of a graph, so its values count
        buffers = (buffer for buffer in self._module.buffers() if not is_complex(buffer))
        self._own = {id(t) for t in (*self._module.parameters(), *buffers)}
        sized: dict[int, Any] = {}
        values: dict[Place, Any] = {}
        self._finder = PlaceFinder(self._module)
        shared: dict[tuple[int, str], list[Place]] = {}
        for place, value, container, key in self._finder.find(self._places):
            if container is not None:
                table = dict_behind(container)
                entry = shared.setdefault((id(table), key), []) if type(key) is str else []
                if not entry:
                    self._containers.append(table)
                    self._keys.append(key)
                    self._values.append(value)
                    self._entries.append(entry)
                entry.append(place)
            state = values[place] = self._state_of(place, value)
            if isinstance(state, TensorState):
                self._tensors.append(value)
            elif isinstance(state, FunctionState):
                self._functions.append(value)
            elif isinstance(state, Snapshot) and isinstance(value, np.ndarray):
                self._arrays.append(value)
            elif isinstance(state, Snapshot):
                self._copied.append(value)
                self._copies.append(state.copy)
            elif isinstance(state, Contents):
                own = value if hasattr(value, "__len__") else vars(value) if hasattr(value, "__dict__") else None
                if own is not None:
                    sized[id(own)] = own
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._wanted = self._checks.requires_grad(self._tensors)
        self._bytes = list(map(_BYTES, self._arrays))
        self._definitions = [(f.__code__, f.__defaults__, copy.copy(f.__kwdefaults__)) for f in self._functions]
        values[HOOKS], values[METHODS] = self._hooks(sized), self._methods(sized)
        self._entries += [[] for _ in range(len(self._values) - len(self._entries))]
        self._sized = [*sized.values(), *self._no_hooks]
        self._lengths = [len(own) for own in self._sized]
        before = self._current.values
        if before.keys() != values.keys() or not all(_equal(before[place], now) for place, now in values.items()):
            self._current = AttributeValues(values)

    def _state_of(self, place: Place, value: Any) -> Any:
        """Return what is compared of a value."""
        if is_plain(value) or value is MISSING or place in self._whole:
            return value
        if isinstance(value, torch.Tensor):
            # what an optimizer does to a weight (of a list of weights, as in torch.nn.LSTM) changes no graph
            return value if id(value) in self._own else TensorState(value, version_of(value), value.requires_grad)
        if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES:
            return Snapshot((value.dtype, value.shape, value.tobytes()))
        if isinstance(value, set):
            return Snapshot(set(value)) if all(map(is_plain, value)) else value
        if isinstance(value, UNORDERED):
            return Snapshot(items_held(value))
        if isinstance(value, (list, tuple, Mapping, collections.deque)):
            return _contents(value)
        if isinstance(value, torch.nn.Module):
            return value
        if isinstance(value, FunctionType) and not is_foreign(value.__code__.co_filename):
            return FunctionState.of(value)
        if isinstance(value, (SimpleNamespace, functools.partial)) or has_readable_attributes(value):
            return Contents(type(value), ())
        if isinstance(value, ITERATORS):  # an export has another object in its place
            return Contents(value.__class__, ())
        return value

    def _hooks(self, sized: dict[int, Any]) -> tuple:
        """Return the hooks of all modules."""
        self._no_hooks = []
        found = []
        for path, module in self._module.named_modules():
            for table in hook_tables(module):
                if table:
                    sized[id(table)] = table
                    self._containers += [table] * len(table)
                    self._keys += list(table)
                    self._values += list(table.values())
                    counting = tuple([hook for hook in table.values() if not is_infrastructure(hook)])
                    found += [(path, counting)] if counting else []
                else:
                    self._no_hooks.append(table)
        return tuple(found)

    def _methods(self, sized: dict[int, Any]) -> tuple:
        """Return the attributes of instances that stand in the place of a method, and the forward of each class."""
        found = []
        for kind in {type(module): None for module in self._module.modules()}:
            for cls in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
                attributes = vars(cls)
                sized[id(cls)] = attributes  # a class may get a method that it has from another class so far
                if "forward" in attributes:
                    self._containers.append(attributes)
                    self._keys.append("forward")
                    self._values.append(attributes["forward"])
                    found.append((cls.__qualname__, "forward", attributes["forward"]))
                    break
        of_tensors = vars(torch.Tensor)  # a method of torch's that a program replaces gets a new entry
        sized[id(torch.Tensor)] = of_tensors
        added = [(name, method) for name, method in of_tensors.items() if name not in OF_TENSORS]
        # another thread may trace at the moment
        found += [("Tensor", name, method) for name, method in added if not _is_foreign_function(method)]
        for path, module in self._module.named_modules():
            own = vars(module)
            sized[id(own)] = own
            kind = type(module)
            for name in own.keys() & _methods_of(kind):
                self._containers.append(own)
                self._keys.append(name)
                self._values.append(own[name])
                found.append((path, name, own[name]))
        return tuple(found)


OF_TENSORS = frozenset(vars(torch.Tensor))
"""Names of the methods that ``torch.Tensor`` has of its own before a program adds some."""


def _is_foreign_function(value: Any) -> bool:
    code = getattr(getattr(value, "fget", value), "__code__", None)
    return code is not None and is_foreign(code.co_filename)


_methods: dict[type, frozenset[str]] = {}


def _methods_of(kind: type) -> frozenset[str]:
    if kind not in _methods:
        _methods[kind] = frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))
    return _methods[kind]


def _contents(value: Any) -> Any:
    """Return what is compared of a container besides its items."""
    kind = type(value)
    if len(value) <= MOST_ITEMS:
        keys = tuple(value) if isinstance(value, Mapping) else (len(value),)
        return Contents(kind, keys)
    parts = value.values() if isinstance(value, Mapping) else value
    if kind in (list, dict) and len(value) <= MOST_COPIED and all(map(is_plain, parts)):
        return Snapshot(kind(value))
    return Contents(kind, (len(value),))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and not is_plain(one):
        return len(one) == len(other) and all(map(_equal, one, other))
    return same(one, other)


def _hook_reason(before: tuple, now: tuple) -> str:
    old, new = dict.fromkeys(path for path, _ in before), dict.fromkeys(path for path, _ in now)
    paths = [path for path in {**old, **new} if path not in old or path not in new] or list(new)
    return f"hooks of {paths[0] or 'the model'} changed" if paths else "hooks changed"
