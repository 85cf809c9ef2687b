"""Unpickle a ``.pt`` file that the user trusts, without reading the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_Replace = Callable[[torch.Tensor, int], Any]


def load_trusted(stream: IO[bytes], replace: _Replace) -> Any:
    """Return the content of the file, unpickled with the real classes; the pickle may run any code.

    Args:
        stream: the zip file; only its directory and its pickle are read.
        replace: takes a dense tensor and the offset of its storage in the file, in bytes; returns the replacement.
            Other tensors (sparse, quantised, without storage) stay.

    Raises:
        Exception: any error of the pickle.
    """
    with FakeTensorMode():
        return _replaced(torch.load(stream, weights_only=False), replace)


def _replaced(value: Any, replace: _Replace) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return value
        start = getattr(value.untyped_storage(), "_checkpoint_offset", None)
        return value if start is None else replace(value, start)
    if isinstance(value, dict):
        return {key: _replaced(item, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, replace) for item in value)
    return value
