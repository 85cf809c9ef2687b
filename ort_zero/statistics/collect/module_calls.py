"""Where in a step a tensor is seen: the tree of module calls, and the tensors that go in and come out."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from ort_zero.compat.torch_modules import WRAPPER_ATTRIBUTES, version_of
from ort_zero.compat.tracing import untraced


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one module."""

    number: int
    """From 0 within the step; the root's is 0."""
    caller: int
    """Number of the call within which it happens, -1 for the root."""
    module_ref: weakref.ref[Module]
    path: str
    """From the root, without the names that wrappers add; empty for the root."""
    occurrence: int
    """1 for the module's first call in the step."""

    @property
    def module(self) -> Module:
        """The module that is called."""
        return self.module_ref()


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One tensor that goes into a call or comes out of it."""

    order: int
    """From 0 within the step, as the code reaches them."""
    call: Call
    kind: str
    """``"input"``, ``"output"`` or ``"inspect"``."""
    slot: str
    """Which of them: ``""`` for a single one, ``"[0]"``, ``".logits"``; the name given to ``inspect_activation``."""
    source: int
    """Order of the place where this very tensor was seen first, -1 if it is here."""

    @property
    def module(self) -> Module:
        """The module that is called."""
        return self.call.module


def clean_path(path: str) -> str:
    """Return a module's path without the parts that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in WRAPPER_ATTRIBUTES)


class Walk:
    """Follows the calls below one root and numbers what it meets. One step at a time."""

    def __init__(self, root: Module):
        self._root = weakref.ref(root)
        self._paths: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.places: list[Place] = []
        self._open: list[Call] = []
        self._calls = 0
        self._occurrences: dict[str, int] = {}
        self._seen: dict[tuple, tuple[int, StorageWeakRef]] = {}

    @property
    def running(self) -> Call | None:
        """The innermost call that has begun and not ended."""
        return self._open[-1] if self._open else None

    def path_of(self, module: Module) -> str:
        """Return the path of a module below the root; that of its type if it is not below."""
        found = self._paths.get(module)
        if found is None:
            for name, part in self._root().named_modules():
                self._paths[part] = clean_path(name)
            found = self._paths.setdefault(module, type(module).__name__)
        return found

    def enter(self, module: Module) -> Call:
        """Take notice of a call that begins."""
        path = self.path_of(module)
        self._occurrences[path] = occurrence = self._occurrences.get(path, 0) + 1
        caller = self._open[-1].number if self._open else -1
        call = Call(self._calls, caller, weakref.ref(module), path, occurrence)
        self._calls += 1
        self._open.append(call)
        return call

    def leave(self, module: Module) -> Call | None:
        """Take notice of a call that ends; calls within it that an exception ended end too. None if it never began."""
        if all(call.module is not module for call in self._open):
            return None
        while True:
            call = self._open.pop()
            if call.module is module:
                return call

    def place(self, tensor: torch.Tensor, call: Call, kind: str, slot: str) -> Place:
        """Return the place of a tensor that the code has reached."""
        key = _key(tensor)
        seen = self._seen.get(key)
        source = seen[0] if seen is not None and not seen[1].expired() else -1
        place = Place(len(self.places), call, kind, slot, source)
        self.places.append(place)
        if source < 0:
            self._remember(key, place, tensor)
        return place

    def same(self, place: Place, tensor: torch.Tensor) -> None:
        """Take `tensor` for the one of `place` from now on."""
        self._remember(_key(tensor), place, tensor)

    def _remember(self, key: tuple, place: Place, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            self._seen[key] = (place.order, StorageWeakRef(tensor.untyped_storage()))


def _key(tensor: torch.Tensor) -> tuple:
    """Return what two Python objects share that are the same values: an identity that autograd made anew counts."""
    if torch.jit.is_tracing():
        with untraced():
            return _key(tensor)
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    memory = tensor.untyped_storage().data_ptr() or id(tensor)
    return (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), version_of(tensor))
