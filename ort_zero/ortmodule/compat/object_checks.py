"""Compares what a module holds with what it held, for the check that precedes each call.

Where models run in ONNX Runtime, its C++ extensions are loaded, and one of them (``object_checks.cpp`` beside this
file) does it at a fifth of the time that Python takes; elsewhere the class here does, with the same results.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ort_zero.ortmodule.compat import extensions

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_DTYPES = {dtype: i for i, dtype in enumerate(d for d in vars(torch).values() if isinstance(d, torch.dtype))}


class InPython:
    """The functions of ``object_checks.cpp``, without it."""

    @staticmethod
    def are_same(containers: list[Any], keys: list[Any], values: list[Any]) -> bool:
        """Return whether each container has the very object of `values` under its key.

        Raises:
            Exception: whatever a container raises that is no dict and has no such key.
        """
        return all(
            (dict.get(table, key, _NONE) if _looks_up_as_dict(table) else table[key]) is value
            for table, key, value in zip(containers, keys, values, strict=True)
        )

    @staticmethod
    def have_lengths(objects: list[Any], lengths: list[int]) -> bool:
        """Return whether each object has its length of `lengths`."""
        return list(map(len, objects)) == lengths

    @staticmethod
    def have_types(objects: list[Any], types: list[type]) -> bool:
        """Return whether each object is of its very class of `types`."""
        return list(map(type, objects)) == types

    @staticmethod
    def requires_grad(tensors: list[torch.Tensor]) -> bytes:
        """Return ``requires_grad`` of each tensor, one byte each."""
        return bytes(map(_REQUIRES_GRAD, tensors))

    @staticmethod
    def scalar_types(tensors: list[torch.Tensor]) -> bytes:
        """Return a number for the dtype of each tensor, one byte each."""
        return bytes([_DTYPES[tensor.dtype] for tensor in tensors])


_NONE = object()


def _looks_up_as_dict(container: Any) -> bool:
    return isinstance(container, dict) and type(container).__getitem__ is dict.__getitem__


def checks() -> Any:
    """Return what has the functions of :class:`InPython`: the extension if it is loaded, else that class."""
    return extensions.loaded("object_checks") or InPython
