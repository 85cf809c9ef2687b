"""Number the module calls of a step, and the tensors that go into the calls and come out of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero.compat.torch_modules import WRAPPER_ATTRIBUTES, version_of


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of one module."""

    number: int
    """Number of the call within the step, from 0; the root's call is 0."""
    caller: int
    """Number of the enclosing call, -1 for the root."""
    module_ref: weakref.ref[Module]
    path: str
    """Path of the module from the root, without the names that wrappers add; empty for the root."""
    occurrence: int
    """Number of the call, counted from 1 among the calls of the same module in the step."""

    @property
    def module(self) -> Module | None:
        """The module that is called; None after the module was deleted."""
        return self.module_ref()


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot:
    """The position of one tensor among the inputs and outputs of a module call."""

    order: int
    """Number of the tensor within the step, from 0, in the order in which the code reaches the tensors."""
    call: ModuleCall
    kind: str
    """Kind of the tensor: ``"input"``, ``"output"`` or ``"inspect"``."""
    name: str
    """Position of the tensor among the tensors of its kind: ``""`` for a single tensor, ``"[0]"``, ``".logits"``; the
    name passed to ``inspect_activation``."""
    source: int
    """Order of the first slot of the same tensor in the step; -1 if this slot is the first."""


def clean_path(path: str) -> str:
    """Return a module's path without the parts that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in WRAPPER_ATTRIBUTES)


class CallTracker:
    """The running numbers of module calls and tensors below one root module, one step at a time."""

    def __init__(self, root: Module):
        self._root = weakref.ref(root)
        self._paths: MutableMapping[Module, str] = WeakIdKeyDictionary()
        self.begin_step()

    def begin_step(self) -> None:
        """Restart the numbers of calls and tensors at 0, and forget the tensors of the last step."""
        self.slots: list[TensorSlot] = []
        self._open: list[ModuleCall] = []
        self._calls = 0
        self._occurrences: dict[str, int] = {}
        self._seen: dict[tuple, tuple[int, StorageWeakRef]] = {}

    @property
    def running(self) -> ModuleCall | None:
        """The innermost call that has begun and not ended; None outside of calls."""
        return self._open[-1] if self._open else None

    def innermost(self, accepts: Callable[[Module], bool]) -> ModuleCall | None:
        """Return the innermost running call of a module that is accepted; None if there is none."""
        return next((c for c in reversed(self._open) if (module := c.module) is not None and accepts(module)), None)

    def occurrences(self, module: Module) -> int:
        """Return the number of calls of a module in the step."""
        return self._occurrences.get(self.path_of(module), 0)

    def earlier_slots(self, path: str, kind: str, name: str) -> list[TensorSlot]:
        """Return the slots of the step with a path, a kind and a name, in order."""
        return [slot for slot in self.slots if (slot.call.path, slot.kind, slot.name) == (path, kind, name)]

    def path_of(self, module: Module) -> str:
        """Return the path of a module from the root, or the name of its class if it is not below the root."""
        path = self._paths.get(module)
        if path is None:
            root = self._root()
            for name, part in root.named_modules() if root is not None else ():
                self._paths[part] = clean_path(name)
            path = self._paths.setdefault(module, type(module).__name__)
        return path

    def enter(self, module: Module) -> ModuleCall:
        """Begin a call of a module, and return the call."""
        path = self.path_of(module)
        self._occurrences[path] = occurrence = self._occurrences.get(path, 0) + 1
        caller = self._open[-1].number if self._open else -1
        call = ModuleCall(self._calls, caller, weakref.ref(module), path, occurrence)
        self._calls += 1
        self._open.append(call)
        return call

    def leave(self, module: Module) -> ModuleCall | None:
        """End the innermost call of a module, and return the call; None if no call of the module has begun.

        Calls inside of it that an exception interrupted end too.
        """
        if all(call.module is not module for call in self._open):
            return None
        while True:
            call = self._open.pop()
            if call.module is module:
                return call

    def slot_of(self, tensor: torch.Tensor, call: ModuleCall, kind: str, name: str) -> TensorSlot:
        """Return a new slot for a tensor that the code has reached, with the fields of :class:`TensorSlot`.

        An earlier tensor of this step with equal memory, shape and version is the same tensor.
        """
        key = _identity(tensor)
        seen = self._seen.get(key)
        source = seen[0] if seen is not None and not seen[1].expired() else -1
        slot = TensorSlot(len(self.slots), call, kind, name, source)
        self.slots.append(slot)
        if source < 0:
            with torch.no_grad():
                self._seen[key] = (slot.order, StorageWeakRef(tensor.untyped_storage()))
        return slot


def _identity(tensor: torch.Tensor) -> tuple:
    """Return a key that is equal for two Python objects with the same memory, layout and version, such as views."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    memory = tensor.untyped_storage().data_ptr() or id(tensor)
    return (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), version_of(tensor))
