"""Define the records that stand for values of a pickle of ``torch.save`` that are not plain Python values.

The record of a tensor says where its elements lie in the file. The record of an object of an unknown class has the name
of the class and the state. No record imports, calls or allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.restricted_pickle.hostile_names import is_hostile


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
        """Bytes of one element."""
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

    offset: int
    """Bytes from the start of the file."""
    length: int
    """Size of the storage in bytes."""
    dtype: str | None
    """Name of the dtype of the elements; None for a storage without a dtype."""


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A dtype, device or layout of torch."""

    kind: str
    """"dtype", "device" or "layout"."""
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
    """Full name of the class or function: "collections.OrderedDict"."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> OpaqueObject:
        """Return a record of a call.

        Raises:
            HostilePickleError: the function acts on the machine, and no checkpoint needs to call it.
        """
        if is_hostile(cls.class_name):
            raise HostilePickleError(cls.class_name)
        return super().__call__(*args, **kwargs)


class AttributeReference(ClassReference):
    """The type of the inert classes for attributes of other names: pickles have classes within classes as these."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> OpaqueObject:
        """Raise an error where a pickle calls an attribute, which may be a method that deletes files or runs programs.

        Raises:
            HostilePickleError: always.
        """
        raise HostilePickleError(cls.class_name)


class OpaqueObject(metaclass=ClassReference):
    """The pickle's record of a call or an object; compared by identity.

    Python's unpickler fills the record by the methods here, which only keep what they are given.
    """

    __slots__ = ("args", "entries", "items", "state")
    class_name = "an object that contains itself"
    """Full name of the class, or of the function that unpickling would call to make the object."""

    args: tuple
    """Arguments of the class or function."""
    state: Any
    """State that unpickling would set: a dict of attributes by name, unless the class defines another form."""
    items: list
    """Items that unpickling would append to the object."""
    entries: list[tuple[Any, Any]]
    """(key, value) pairs that unpickling would set in the object."""

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
        """Refuse a call of the result of another call.

        Raises:
            HostilePickleError: always.
        """
        raise HostilePickleError(f"the result of {self.class_name}")

    def __repr__(self) -> str:
        return f"<{self.class_name}>"
