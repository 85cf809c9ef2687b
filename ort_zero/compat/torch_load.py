"""Unpickle a ``.pt`` file that the user trusts, without reading the bytes of its tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_Replace = Callable[[torch.Tensor, int], Any]
_C: Any = torch._C


def load_trusted(stream: IO[bytes], replace: _Replace) -> Any:
    """Return the content of the file, unpickled with the real classes; the pickle may run any code.

    Args:
        stream: the zip file; only its directory and its pickle are read.
        replace: takes a dense tensor and the offset of its storage in the file, in bytes; returns the replacement.
            Other tensors (sparse, quantised, without storage) stay.

    Raises:
        Exception: any error of the pickle.
    """
    storages = _Storages(stream)
    with FakeTensorMode():
        content = torch.load(stream, weights_only=False, pickle_module=storages.pickle_module())
        return _replaced(content, storages.offsets, replace)


class _Storages:
    """The file offsets of the storages that torch makes while it unpickles; torch up to 2.6 does not keep them.

    Args:
        stream: the zip file.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._file = _C.PyTorchFileReader(stream)
        stream.seek(0)
        self.offsets: dict[int, int] = {}
        """Offset of each storage's record in the file, in bytes, by the address of the storage."""
        self._alive: list[Any] = []

    def pickle_module(self) -> Any:
        """Return the object that ``torch.load`` uses as the module ``pickle``."""
        storages = self

        class Unpickler(pickle._Unpickler):
            """Python's unpickler, whose requests for storages can be observed, unlike requests of C's unpickler."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, storages.noting(value) if name == "persistent_load" else value)

        return SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=pickle.load)

    def noting(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls `load`, which makes a storage, and notes the storage's offset."""

        def noted(saved_id: Any) -> Any:
            typed = load(saved_id)
            storage = getattr(typed, "_untyped_storage", None)
            if storage is not None:
                self.offsets[storage._cdata] = self._file.get_record_offset(f"data/{saved_id[2]}")
                self._alive.append(storage)
            return typed

        return noted


def _replaced(value: Any, offsets: dict[int, int], replace: _Replace) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return value
        start = offsets.get(value.untyped_storage()._cdata)
        return value if start is None else replace(value, start)
    if isinstance(value, dict):
        return {key: _replaced(item, offsets, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, offsets, replace) for item in value)
    return value
