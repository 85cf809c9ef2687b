"""Unpickles a ``.pt`` of ``torch.save`` without the bytes of its tensors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

_lock = threading.Lock()  # the table of allowed classes belongs to the whole process


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose elements are still in the file."""

    offset: int
    """Bytes from the start of the file to its first element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance between neighbours along each axis, in elements."""
    storage_offset: int
    """Bytes from the start of the file to the storage it is a view of."""


class ForeignClassError(Exception):
    """The pickle holds classes or functions that are not allowed.

    Attributes:
        names: their full names.
    """

    def __init__(self, names: list[str]):
        super().__init__(", ".join(names))
        self.names = names


def load_without_data(stream: IO[bytes], classes: Mapping[str, type], trust: bool = False) -> Any:
    """Return what the file holds, with a :class:`StoredTensor` in the place of every dense tensor.

    Args:
        stream: the zip; only its directory and its pickle are read.
        classes: full names that may occur besides what torch allows, and what stands in for them.
        trust: unpickle everything, with the real classes. The pickle may then run any code.

    Raises:
        ForeignClassError: a class or function that is not allowed; nothing was called.
        Exception: whatever a malformed pickle makes the unpickler raise.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if trust:
        with FakeTensorMode():
            return _replaced(torch.load(stream, weights_only=False))
    with _lock, torch.serialization.safe_globals([(stand_in, name) for name, stand_in in classes.items()]):
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        if foreign:
            raise ForeignClassError(sorted(foreign))
        stream.seek(0)
        with FakeTensorMode():
            try:
                return _replaced(torch.load(stream, weights_only=True))
            except pickle.UnpicklingError as error:
                # torch adds advice to switch the protection off; the cause is after it
                raise pickle.UnpicklingError(str(error).rpartition("WeightsUnpickler error: ")[2]) from None


def _replaced(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _stored(value)
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_replaced, value))
    return value


def _stored(tensor: torch.Tensor) -> Any:
    """Return the place of a dense tensor; others (sparse, quantised, without storage) as they are."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None:
        return tensor
    return StoredTensor(
        offset=start + tensor.storage_offset() * tensor.element_size(),
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        storage_offset=start,
    )
