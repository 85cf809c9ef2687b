"""Define the records that stand for values of a pickle of ``torch.save`` that are not plain Python values.

The record of a tensor says where its elements lie in the file. The record of an object of an unknown class has the name
of the class and the state. No record imports, calls or allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.files import dtypes


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
class ClassReference:
    """A class or function that the pickle names; it was not imported."""

    name: str
    """Full name: "collections.OrderedDict"."""


@dataclass(frozen=True, slots=True)
class FragmentAddress:
    """The place of a part of a parameter in a flat tensor, in elements, as DeepSpeed's files note it."""

    numel: int
    start: int


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """The pickle's record of an object whose class is not imported; compared by identity."""

    class_name: str
    """Full name of the class, or of the function that unpickling would call to make the object."""
    args: tuple = ()
    """Arguments of the class or function."""
    kwargs: dict = field(default_factory=dict)
    state: Any = None
    """State that unpickling would set: a dict of attributes by name, unless the class defines another form."""
    items: list = field(default_factory=list)
    """Items that unpickling would append to the object."""
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    """(key, value) pairs that unpickling would set in the object."""
    called: bool = False
    """True if unpickling would call a function or class; False if it would make the object without a call."""

    def __repr__(self) -> str:
        return f"<{self.class_name}>"

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name` that unpickling would set, or `default`."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default
