"""The values that a pickle of ``torch.save`` is read into besides Python's own: records that do nothing.

A tensor is a record of where its elements lie. An object of a class that is not known is a record of the name of its
class and of its state. None of them imports, calls or allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.files import dtypes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A dense tensor whose elements are still in the file."""

    offset: int
    """Bytes from the start of the file to its first element."""
    dtype: str
    """Name of its dtype as torch has it, without the module: "float32"."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance between neighbours along each axis, in elements."""
    storage_offset: int
    """Bytes from the start of the file to the storage it is a view of."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtypes.itemsize_of(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage of torch: the bytes of which tensors are views."""

    offset: int
    """Bytes from the start of the file."""
    length: int
    """Number of bytes."""
    dtype: str | None
    """Name of the dtype of its elements; None for a storage without one."""


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A dtype, device or layout of torch."""

    kind: str
    """"dtype", "device" or "layout"."""
    name: str
    """What ``str()`` gives for it, without the module: "bfloat16", "cuda:0", "strided"."""


@dataclass(frozen=True, slots=True)
class ClassReference:
    """The name of a class or function, which was not imported."""

    name: str
    """Its full name: "collections.OrderedDict"."""


@dataclass(frozen=True, slots=True)
class FragmentAddress:
    """The place of a part of a parameter in a flat tensor, as DeepSpeed's files have it."""

    numel: int
    start: int


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """An object whose class is not known here: what the pickle says of it. Compared by identity."""

    class_name: str
    """Full name of the class, or of the function that would have made the object."""
    args: tuple = ()
    """The arguments of the class or function."""
    kwargs: dict = field(default_factory=dict)
    state: Any = None
    """What would have become its attributes: a dict by name unless the class has its own way."""
    items: list = field(default_factory=list)
    """What would have been appended to it."""
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    """(key, value) of what would have been set in it."""
    called: bool = False
    """True if a function or class was to be called for it; False for an object that was made without a call."""

    def __repr__(self) -> str:
        return f"<{self.class_name}>"

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return what would have been the attribute `name`, or `default`."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default
