"""Records what the Python code of a module reads besides its arguments while it is traced: attributes and globals.

The trace holds for the values that were read. :class:`ort_zero.runtime.export.tracer.Tracer` records;
:mod:`ort_zero.runtime.guards.attribute_guard` compares at each call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import (
    CodeType,
    FrameType,
    FunctionType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch

from ort_zero.compat.frames import (
    ADDED_TO,
    FILLED,
    is_augmented_read,
    is_foreign,
    is_installed,
    is_only_filled,
    use_of_read,
)
from ort_zero.compat.size_numbers import REPLACED_BUILTINS
from ort_zero.compat.torch_modules import (
    BOOKKEEPING,
    BUFFER_TABLE,
    buffer_table,
    is_complex,
    parameter_table,
    submodule_table,
)
from ort_zero.log import get_logger
from ort_zero.runtime.export.attribute_paths import (
    ATTRIBUTE,
    CELL,
    DEFAULT,
    GLOBAL,
    ITEM,
    MISSING,
    Place,
    attributes_of,
    defaults_of,
    is_number,
    is_plain,
    is_slot,
)
from ort_zero.runtime.export.attribute_records import CODE, AttributeRecord
from ort_zero.runtime.export.callables import place_of
from ort_zero.runtime.export.functions_with_values import (
    CONTAINERS,
    functions_of,
    has_readable_attributes,
    own_global_names,
)
from ort_zero.utils.profile_function import profile_function

_INTERNAL = frozenset(vars(torch.nn.Module()))


class AttributeReads(AttributeRecord):
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
        super().__init__(model, running, plain_key)
        self._enter = enter
        self._known: dict[tuple[int, Any], Place | None] = {}
        """Place of each attribute that was read, by the object's ``id()`` and the name; None if it does not count."""
        self._patched: dict[type, Callable[[], None]] = {}
        self._codes: set[CodeType] = set()
        self._functions = {code: [found] for code, found in functions_of(model)}
        """Functions that hold values, with their places, by their code."""
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
        counts = is_plain(value) or users and not isinstance(value, (*CODE, torch.nn.Module)) and (
            isinstance(value, (torch.Tensor, list, tuple, dict, SimpleNamespace)) or has_readable_attributes(value)
        )  # fmt: skip
        if counts and not place.steps[-1][1].startswith("__"):
            self._add(place, value)

    def _note_closure(self, place: Place, function: Any) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not set yet
                value = cell.cell_contents
                if not isinstance(value, (*CODE, torch.nn.Module)):
                    self._note_use(function, name, value)
                    self._add(place.then(CELL, name), value)
        for name, value in defaults_of(function).items():
            if isinstance(value, CONTAINERS):
                self._note_use(function, name, value)
                self._add(place.then(DEFAULT, name), value)

    def _note_use(self, function: Any, name: str, value: Any) -> None:
        if isinstance(value, CONTAINERS) and not is_only_filled(function.__code__, name):
            self._looked_into.add(id(value))


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


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_foreign(file) and not is_installed(file)
