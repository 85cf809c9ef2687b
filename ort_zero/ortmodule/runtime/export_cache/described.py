"""Any value as text that is equal for values that make equal graphs."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import logging
import os
import pathlib
import re
import sys
import threading
import uuid
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch

from ort_zero.ortmodule.compat.frames import is_foreign
from ort_zero.ortmodule.compat.torch_modules import (
    BOOKKEEPING,
    buffer_table,
    is_complex,
    parameter_table,
    submodule_table,
)
from ort_zero.ortmodule.runtime.export_cache.criteria import digest_of
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable

_DEPTH = 12
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{8,}")
_INTERNAL = frozenset(vars(torch.nn.Module()))
AS_REPR = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
     slice, range, type(...), re.Pattern, decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime,
     datetime.time, datetime.timedelta, datetime.timezone, pathlib.PurePosixPath, pathlib.PureWindowsPath,
     pathlib.PosixPath, pathlib.WindowsPath, uuid.UUID, torch.finfo, torch.iinfo}
)  # fmt: skip
"""Types whose ``repr`` describes a value completely."""
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
"""Classes of Python's library whose instances are what their attributes are."""
_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))
_CACHED = type(functools.lru_cache(len))
_WITHOUT_EFFECT = (logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()))
"""Types of objects that no result of a forward depends on."""
FUNCTIONS = (FunctionType, BuiltinFunctionType, WrapperDescriptorType, MethodWrapperType, type(str.join),
             type(torch.relu))  # fmt: skip


def qualified(kind: Any) -> str:
    """Return ``"module.Name"`` of a class or function."""
    module = getattr(kind, "__module__", None)
    name = getattr(kind, "__qualname__", None) or getattr(kind, "__name__", type(kind).__qualname__)
    return f"{module}.{name}"


def without_addresses(text: str) -> str:
    """Return a ``repr`` without what differs from process to process."""
    return _ADDRESS.sub("", text)


class Describer:
    """Returns any value as text that is equal for values that make equal graphs.

    A call raises :class:`NotStorable` for a tensor whose values cannot be read, and for a function in no file.

    Args:
        root: parts of it are described by their paths.
        objects: look into instances of the user's classes; without it only their class counts.

    Attributes:
        code: the classes and functions that were met and are not torch's, ONNX Runtime's, DeepSpeed's or Python's:
            what the values do depends on their code.
    """

    def __init__(self, root: torch.nn.Module | None = None, *, objects: bool = True):
        self._objects = objects
        self._known: dict[int, str] = {}
        if root is not None:
            self._known = {id(m): f"module {path}" for path, m in root.named_modules()}
            self._known |= {id(t): f"tensor {name}" for name, t in root.named_parameters()}
            self._known |= {id(t): f"tensor {name}" for name, t in root.named_buffers() if not is_complex(t)}
        self._open: set[int] = set()
        self._alive: list[Any] = []
        self._foreign: dict[str, bool] = {}
        self.code: list[Any] = []

    def __call__(self, value: Any, depth: int = 0) -> str:
        kind = type(value)
        if kind in AS_REPR:
            return repr(value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        if not self.is_foreign(kind):
            self.code.append(kind)
        if id(value) in self._open or depth > _DEPTH:
            return f"{qualified(kind)} again"
        self._open.add(id(value))
        try:
            text = self._text(value, kind, depth + 1)
        finally:
            self._open.discard(id(value))
        if hasattr(value, "__dict__"):
            self._known[id(value)] = text
            self._alive.append(value)  # or another object could get its id
        return text

    def _text(self, value: Any, kind: type, depth: int) -> str:
        if isinstance(value, torch.Tensor):
            return _content(value)
        if isinstance(value, enum.Enum):
            return f"{qualified(kind)}.{value.name} {self(value.value, depth)}"
        if isinstance(value, Mapping):
            pairs = [f"{self(key, depth)}: {self(part, depth)}" for key, part in value.items()]
            return f"{qualified(kind)}{{{', '.join(pairs)}}}{self._own(value, kind, depth)}"
        if isinstance(value, (list, tuple, deque)):
            return f"{qualified(kind)}[{', '.join([self(part, depth) for part in value])}]"
        if isinstance(value, (set, frozenset)):
            return f"{qualified(kind)}{{{', '.join(sorted([self(part, depth) for part in value]))}}}"
        if isinstance(value, functools.partial):
            return f"partial {self((value.func, value.args, value.keywords), depth)}"
        if isinstance(value, MethodType):
            return f"method {self(value.__func__, depth)} of {self(value.__self__, depth)}"
        if isinstance(value, FUNCTIONS):
            return self._function(value, depth)
        if isinstance(value, type):
            if not self.is_foreign(value):
                self.code.append(value)
            return f"class {qualified(value)}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if hasattr(kind, "__array_interface__"):
            return _array(value)
        if isinstance(value, torch.jit.ScriptFunction):
            return f"{qualified(kind)} {value.code}"
        if isinstance(value, _CACHED):
            return f"cached {self(value.__wrapped__, depth)}"
        if isinstance(value, np.dtype):
            return f"dtype {value!r}"
        if isinstance(value, _OPERATORS):
            return f"operator {value}"
        return self._object(value, kind, depth)

    def _function(self, value: Any, depth: int) -> str:
        code = getattr(value, "__code__", None)
        if code is None:
            owner = _owner_of(value)
            return f"function {qualified(value)}{'' if owner is None else f' of {self(owner, depth)}'}"
        if not is_foreign(code.co_filename):
            _check_file(value)
            self.code.append(value)
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        given = (value.__defaults__, value.__kwdefaults__, _closure_of(value))
        return f"function {qualified(value)} {where} {self(given, depth)}"

    def _object(self, value: Any, kind: type, depth: int) -> str:
        if isinstance(value, (float, int, str, bytes)):  # of a class of its own
            return f"{qualified(kind)} {without_addresses(repr(value))}"
        if isinstance(value, torch.nn.Module) and self._objects:  # hidden from the tree
            parts = {**parameter_table(value), **buffer_table(value), **submodule_table(value)}
            return f"{qualified(kind)} {value.training} {self(parts, depth)}{self._own(value, kind, depth)}"
        if not self._objects or self.is_foreign(kind) and not isinstance(value, _NAMESPACES):
            return qualified(kind)
        return f"{qualified(kind)}{self._own(value, kind, depth)}"

    def _own(self, value: Any, kind: type, depth: int) -> str:
        """Return the attributes of an instance of a class that is not of a library whose version is known."""
        if not self._objects or self.is_foreign(kind) and not isinstance(value, (*_NAMESPACES, torch.nn.Module)):
            return ""
        own = dict(getattr(value, "__dict__", {}))
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    own[name] = getattr(value, name)
        shown = [f"{n}={self(v, depth)}" for n, v in own.items() if n not in _INTERNAL and not BOOKKEEPING.match(n)]
        return f"({', '.join(shown)})"

    def tells(self, value: Any) -> bool:
        """Return whether the text of a value, described with `objects`, is another one for another state of it.

        Of objects that C code holds, and of those of foreign classes, it names the class alone.
        """
        kind = type(value)
        if isinstance(value, FUNCTIONS):
            owner = _owner_of(value)
            return owner is None or self.tells(owner)
        return (
            kind in AS_REPR
            or kind is object
            or isinstance(value, (_TOLD, _NAMESPACES, _OPERATORS, _WITHOUT_EFFECT))
            or hasattr(kind, "__array_interface__")
            or not (self.is_foreign(kind) or _has_hidden_state(kind))
        )

    def modules(self) -> set[str]:
        """Return the names of the modules that the classes and functions in `code` come from."""
        # a class of C has a descriptor under that name
        spaces = [value.__globals__.get("__name__") for value in self.code if isinstance(value, FunctionType)]
        return {name for name in (*spaces, *(value.__module__ for value in self.code)) if isinstance(name, str)}

    def knows(self, value: Any) -> bool:
        """Return True for the root's modules and tensors, and for what was described before."""
        return id(value) in self._known

    def is_foreign(self, kind: type) -> bool:
        """Return True for classes of torch, Python and others whose versions are criteria."""
        name = kind.__module__
        if name not in self._foreign:
            file = file_of(name)
            self._foreign[name] = name in sys.builtin_module_names if file is None else is_foreign(file)
        return self._foreign[name]


def _owner_of(function: Any) -> Any:
    """Return the object whose method a function of C is; None for one of a module or class."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (ModuleType, type)) or type(owner).__module__ == "pybind11_builtins":
        return None
    # what pybind11 has made belongs to a record of its own or a capsule
    return None if type(owner).__qualname__ == "PyCapsule" else owner


_TOLD = (torch.Tensor, enum.Enum, Mapping, list, tuple, deque, set, frozenset, functools.partial, MethodType, type,
         ModuleType, torch.nn.Module, torch.jit.ScriptFunction, float, int, str, bytes, property, staticmethod,
         classmethod, ContextVar, np.dtype, _CACHED)  # fmt: skip
"""Types whose values, or whose parts, are described, here or where a class or a context is."""


def _has_hidden_state(kind: type) -> bool:
    """Return whether an instance is larger than its attributes and slots, so that C code keeps something in it."""
    slots = 0
    for cls in kind.__mro__:
        names = vars(cls).get("__slots__", ())
        slots += len([names] if isinstance(names, str) else [name for name in names if not name.startswith("__")])
    words = slots + bool(kind.__dictoffset__) + bool(kind.__weakrefoffset__)
    return kind.__basicsize__ > object.__basicsize__ + words * tuple.__itemsize__


def file_of(name: str) -> str | None:
    """Return the path of the file of a loaded module, or of the package that it is in; None if there is none."""
    while name and name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str):
            return os.path.abspath(file)
        name = name.rpartition(".")[0]
    return None


def _check_file(function: FunctionType) -> None:
    """Raise NotStorable for a function whose code is not that of its module's file."""
    code, name = function.__code__, str(function.__globals__.get("__name__"))
    file = file_of(name)
    if name.startswith("namedtuple_"):
        return  # made by the standard library
    if file is None or vars(sys.modules[name]) is not function.__globals__:
        raise NotStorable(f"code of {code.co_filename} is in no module that has a file")
    if code.co_filename.startswith("<"):
        if not re.fullmatch("__.*__", function.__name__) and not is_foreign(file):  # dataclasses have such methods
            raise NotStorable(f"code of {code.co_filename} is in no file")
    elif code.co_filename != file and os.path.realpath(code.co_filename) != os.path.realpath(file):
        raise NotStorable(f"code of {code.co_filename} runs in module {name}, which is another file")


def _closure_of(function: FunctionType) -> list[Any]:
    """Return the values that a function has from the functions around it."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            found.append(cell.cell_contents)
    return found


def kind_of(tensor: torch.Tensor) -> str:
    """Return dtype and device of a tensor: ``"float32"``, ``"float16 cuda"``."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if tensor.device.type == "cpu" else f"{kind} {tensor.device.type}"


def _content(tensor: torch.Tensor) -> str:
    """Return kind and digest of the values of a tensor that is part of the code, so to speak."""
    try:
        about = f"tensor {kind_of(tensor)} {list(tensor.shape)}"
        if tensor.device.type == "meta":
            return about
        dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        plain = dense.resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return f"{about} {digest_of(plain.view(torch.uint8).numpy().data if plain.numel() else b'')}"
    except Exception as error:  # whatever a subclass of tensors cannot do
        raise NotStorable(f"a {qualified(type(tensor))} has values that cannot be read: {error}") from None


def _array(value: Any) -> str:
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        return f"array {array.shape} {without_addresses(repr(array.tolist()))}"
    return f"array {array.dtype.str} {array.shape} {digest_of(array.tobytes())}"
