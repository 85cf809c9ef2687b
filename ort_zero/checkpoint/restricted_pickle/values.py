"""Define the records that stand for values of a pickle of ``torch.save`` that are not plain Python values.

The record of a tensor says where its elements lie in the file. The record of an object of an unknown class has the name
of the class and the state. No record imports, calls or allocates anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.files import dtypes

_HOSTILE_MODULES = frozenset(
    "os posix nt sys subprocess _posixsubprocess pty socket shutil ctypes importlib runpy code codeop pdb bdb timeit "
    "webbrowser urllib http ftplib smtplib telnetlib tempfile multiprocessing threading _thread concurrent asyncio "
    "signal site imp zipimport pip ensurepip venv commands builtins io _io functools operator pickle _pickle marshal "
    "shelve dill cloudpickle joblib linecache types".split()
)
_HOSTILE = re.compile(
    r"torch\.((hub|utils\.cpp_extension|jit|package)\b.*|load|save)"
    r"|numpy\.((testing|f2py)\b.*|load|save|fromfile|memmap)"
)
_HARMLESS = re.compile(
    r"builtins\.(object|list|dict|tuple|set|frozenset|int|float|bool|str|bytes|bytearray|complex|slice|range|getattr|type)"
    r"|builtins\.[A-Z]\w*(Error|Exception|Warning|StopIteration|KeyboardInterrupt|SystemExit)"
    r"|types\.SimpleNamespace|functools\.partial|operator\.(itemgetter|attrgetter)|_?io\.(BytesIO|StringIO)"
)
"""The functions and classes of hostile modules that only make a value."""


def is_hostile(name: str) -> bool:
    """Return True if a function or class acts on the machine or runs code, and no checkpoint needs to call it.

    ort_zero calls nothing in either case. But a file with a hostile call does harm where ``torch.load`` unpickles it.
    """
    in_hostile_module = name.partition(".")[0] in _HOSTILE_MODULES
    return _HOSTILE.fullmatch(name) is not None or in_hostile_module and _HARMLESS.fullmatch(name) is None


class MalformedPickleError(ValueError):
    """The error for a pickle that the pickler of Python 3 cannot have written."""


class HostilePickleError(Exception):
    """The error for a pickle that calls a function acting on the machine, or the result of another call; its name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A dense tensor whose elements are still in the file."""

    offset: int
    """Bytes from the start of the file to the first element."""
    dtype: str
    """Name of torch's dtype, without the module: "float32"."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance between neighbours along each axis, in elements of the storage."""
    storage_offset: int
    """Bytes from the start of the file to the storage of which the tensor is a view."""

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize_of(self.dtype)

    @property
    def span(self) -> int:
        """Elements of the storage from the tensor's first to its last; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) + 1

    @property
    def is_row_major(self) -> bool:
        """True if the elements lie one after the other, the last axis first, or if there are none."""
        if 0 in self.shape:
            return True
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage of torch: the bytes of which tensors are views."""

    offset: int  # bytes from the start of the file
    length: int  # bytes
    dtype: str | None
    """Name of the dtype of the elements; None for a storage without a dtype."""


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A dtype, device or layout of torch."""

    kind: str
    name: str
    """Result of ``str()`` without the module: "bfloat16", "cuda:0", "strided"."""


@dataclass(frozen=True, slots=True)
class FragmentAddress:
    """The place of a part of a parameter in a flat tensor, in elements, as DeepSpeed's files note it."""

    numel: int
    start: int


class ClassReference(type):
    """The type of the inert classes that stand for the names of a pickle; nothing was imported.

    A name needs a class, because Python's unpickler makes objects of classes only.
    """

    class_name: str

    def __call__(cls, /, *args: Any, **kwargs: Any) -> OpaqueObject:
        """Return a record of a call."""
        if is_hostile(cls.class_name):
            raise HostilePickleError(cls.class_name)
        return super().__call__(*args, **kwargs)


class AttributeReference(ClassReference):
    """The type of the inert classes for attributes of other names: pickles have classes within classes as these."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> OpaqueObject:
        """Refuse the call of an attribute, which may be a method that deletes files or runs programs."""
        raise HostilePickleError(cls.class_name)


class OpaqueObject(metaclass=ClassReference):
    """The pickle's record of a call or an object; compared by identity.

    Python's unpickler fills the record by the methods here, which only keep what they are given.
    """

    __slots__ = ("args", "entries", "items", "state")
    class_name = "an object that contains itself"
    """Full name of the class, or of the function that unpickling would call to make the object."""

    args: tuple
    state: Any
    """State that unpickling would set: a dict of attributes by name, unless the class defines another form."""
    items: list
    entries: list[tuple[Any, Any]]

    def __new__(cls, /, *args: Any, **_kwargs: Any) -> OpaqueObject:
        """Return a record with the arguments of the class or function; no reader needs the keywords."""
        record = object.__new__(cls)
        record.args, record.state, record.items, record.entries = args, None, [], []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def extend(self, items: list[Any]) -> None:
        """Keep items that unpickling would append."""
        self.items.extend(items)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call of the result of another call."""
        raise HostilePickleError(f"the result of {self.class_name}")

    def __repr__(self) -> str:
        return f"<{self.class_name}>"
