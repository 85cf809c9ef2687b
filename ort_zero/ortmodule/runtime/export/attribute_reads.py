"""Records what the Python code of a module reads besides its arguments while it is traced: attributes and globals.

The trace holds for the values that were read. :class:`ort_zero.ortmodule.runtime.export.tracer.Tracer` records;
:mod:`ort_zero.ortmodule.runtime.guards.attribute_guard` compares at each call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, MethodType
from typing import Any

import torch

from ort_zero.log import get_logger
from ort_zero.ortmodule.compat.frames import ADDED_TO, FILLED, is_augmented_read, is_foreign, use_of_read
from ort_zero.ortmodule.compat.torch_modules import (
    BOOKKEEPING,
    BUFFER_TABLE,
    buffer_table,
    is_complex,
    parameter_table,
    submodule_table,
)
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    ITEM,
    MISSING,
    Place,
    attributes_of,
    is_number,
    is_slot,
)
from ort_zero.ortmodule.runtime.export.attribute_records import CACHED_FUNCTION, CODE
from ort_zero.ortmodule.runtime.export.callables import place_of
from ort_zero.ortmodule.runtime.export.code_reads import CodeReads
from ort_zero.ortmodule.runtime.export.functions_with_values import CONTAINERS
from ort_zero.ortmodule.utils.new_objects import NewObjects
from ort_zero.ortmodule.utils.profile_function import profile_function

_INTERNAL = frozenset(vars(torch.nn.Module()))


class AttributeReads(CodeReads):
    """Records the reads of one trace.

    Args:
        model: the user's module.
        running: returns the innermost module that runs, None outside of all.
        enter: called with the globals of each function of the user's before it runs.
        plain_key: returns a key of a dict with Python numbers in the place of sizes.
        callables: functions, and objects that are called, among the arguments; see :mod:`.callables`.
        new_objects: knows what was made for this call, which nobody else can change; None for what the forward makes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        running: Callable[[], torch.nn.Module | None],
        enter: Callable[[dict[str, Any]], None] = lambda names: None,
        plain_key: Callable[[Any], Any] = lambda key: key,
        callables: Iterable[Any] = (),
        new_objects: NewObjects | None = None,
    ):
        self._known: dict[tuple[int, Any], Place | None] = {}
        """Place of each attribute that was read, by the object's ``id()`` and the name; None if it does not count."""
        self._patched: dict[type, Callable[[], None]] = {}
        self._new_objects = new_objects or NewObjects()
        super().__init__(model, running, enter, plain_key, callables)

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
            with self._new_objects.noted(), profile_function(self._event):
                yield
        finally:
            _Active.reads = before
            for undo in reversed(list(self._patched.values())):
                undo()
            self._patched.clear()

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if _Active.reads is self:
            self._happened(frame, event, argument)

    def _patch(self, kind: type) -> None:
        """Let the instances of a class tell what is read from them, and written to them, while reads are recorded."""
        if _Active.reads is not self or self._is_patched(kind):
            return
        read: Any = kind.__getattribute__
        write: Any = kind.__setattr__
        delete: Any = kind.__delattr__

        def __getattribute__(obj: Any, name: str) -> Any:
            reads = _Active.reads
            if name == "__dict__" and reads is not None and not is_foreign(sys._getframe(1).f_code.co_filename):
                reads._note_all(obj)
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

    def _is_patched(self, kind: type) -> bool:
        """Return True if a class, or the one that it inherits its reads and writes from, tells of them already."""
        bases = kind.__mro__
        patched = next((i for i, base in enumerate(bases) if base in self._patched), None)
        if patched is None:
            return False
        own = ("__getattribute__", "__setattr__", "__delattr__")
        return not any(name in vars(base) for base in bases[:patched] for name in own)

    def _origin_of(self, obj: Any) -> Place | None:
        """Return the place of an object; None for one that the forward has made itself."""
        origin = self._origins.get(id(obj))
        if origin is None and not isinstance(obj, torch.nn.Module) and obj not in self._new_objects:
            origin = self._origins[id(obj)] = place_of(obj)
            self._alive.append(obj)
        return origin

    def _note_write(self, obj: Any, name: str) -> None:
        origin = self._origin_of(obj)
        if origin is None or name in _INTERNAL or BOOKKEEPING.match(name):
            return
        place = origin.then(ATTRIBUTE, name)
        if place not in self._written:
            self._written[place] = (attributes_of(obj) or {}).get(name, MISSING), self._running()

    def _note_missing(self, obj: Any, name: str) -> None:
        origin = self._origin_of(obj)
        if origin is None or (id(obj), name) in self._known:
            return
        if isinstance(obj, torch.nn.Module):
            if is_complex(dict.get(buffer_table(obj), name)):  # no graph has it for an input
                place = origin.then(ATTRIBUTE, BUFFER_TABLE).then(ITEM, name)
                self._known[id(obj), name] = place
                return self._add(place, buffer_table(obj)[name])
            tables = parameter_table(obj), buffer_table(obj), submodule_table(obj)
            if any(dict.__contains__(table, name) for table in tables):
                return  # of what the guard on the module tree knows
        elif hasattr(type(obj), "__getattr__"):
            return
        self._add(origin.then(ATTRIBUTE, name), MISSING)
        self._known[id(obj), name] = origin.then(ATTRIBUTE, name)

    def _note_all(self, obj: Any) -> None:
        """Note all attributes of an object, whose dict is read: ``vars(obj)["scale"]``."""
        origin = self._origin_of(obj)
        if origin is None:
            return
        for name, value in list((attributes_of(obj) or {}).items()):
            if name in _INTERNAL or BOOKKEEPING.match(name) or (id(obj), name) in self._known:
                continue
            if isinstance(value, CONTAINERS):
                self._look_into(value)
            self._known[id(obj), name] = origin.then(ATTRIBUTE, name)
            self._add(origin.then(ATTRIBUTE, name), value)

    def _note(self, obj: Any, name: str, value: Any) -> None:
        key = (id(obj), name)
        if isinstance(value, CONTAINERS) and use_of_read(sys._getframe(2)) != FILLED:
            self._look_into(value)
        if key in self._known:
            place = self._known[key]
            if place is not None:
                self._read_again(place)
            elif key in self._updated and not is_augmented_read(sys._getframe(2)):
                self._add(self._origins[id(obj)].then(ATTRIBUTE, name), self._updated[key][0])
            return
        origin = self._origin_of(obj)
        if origin is None or self._is_changed_class_attribute(obj, name, value):
            return
        place = origin.then(ATTRIBUTE, name)
        if isinstance(value, MethodType) and isinstance(value.__func__, CACHED_FUNCTION):
            self._note_entries(place, value.__func__)
        if BOOKKEEPING.match(name) or not _is_stored(obj, name):
            place = None
        elif is_number(value) and is_augmented_read(sys._getframe(2)):
            # the value goes into the next one, and perhaps nowhere else
            self._updated[key] = value, use_of_read(sys._getframe(2)) == ADDED_TO
            return
        self._known[key] = place
        if place is not None:
            self._add(place, value)


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


def _is_stored(obj: Any, name: str) -> bool:
    """Return whether an attribute is a value that the object, or its class, holds; no method, nothing computed."""
    own = attributes_of(obj)
    if own is not None and name in own:
        return True
    for cls in type(obj).__mro__:
        if name in vars(cls):
            value = vars(cls)[name]
            return is_slot(value) or not (isinstance(value, CODE) or hasattr(type(value), "__get__"))
    return False
