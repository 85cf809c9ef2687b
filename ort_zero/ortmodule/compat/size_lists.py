"""Keeps sizes in Python lists open in a trace: the tracer takes the items of a list for constants."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ort_zero.ortmodule.compat.trace_state import is_in_graph

_CONSTRUCTORS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Functions that make tensors of lists, and the position of the list."""
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def with_open_lists(func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """Return a call that does the same, in which no list holds a tensor that the traced graph computes.

    ``torch.tensor([n, 2])`` becomes a stack of numbers, and so does the list in ``x[:, [0, n - 1]]``.
    """
    if func in _INDEXING:
        index = args[1]
        if isinstance(index, tuple):
            index = tuple(_stacked(part) if _has_computed(part) else part for part in index)
        elif _has_computed(index):
            index = _stacked(index)
        return func, (args[0], index, *args[2:]), kwargs
    position = _CONSTRUCTORS.get(func)
    if position is None or len(args) <= position or kwargs.get("requires_grad"):
        return func, args, kwargs
    data = args[position]
    if isinstance(data, torch.Tensor) and func is torch.tensor and data.dim() == 0 and is_in_graph(data):
        data = [data]
        return _made, (data, True), kwargs
    if not _has_computed(data):
        return func, args, kwargs
    if func is torch.Tensor.new_tensor:
        kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
    return _made, (data, False), kwargs


def _has_computed(data: Any) -> bool:
    """Return whether a list holds a tensor that the traced graph computes, at any depth."""
    if not isinstance(data, (list, tuple)):
        return False
    return any(is_in_graph(item) if isinstance(item, torch.Tensor) else _has_computed(item) for item in data) and all(
        isinstance(item, (torch.Tensor, bool, int, float, list, tuple)) for item in data
    )


def _made(data: list, single: bool, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    made = _stacked(data, dtype)
    if device is not None:
        made = made.to(device)
    return made.squeeze(0) if single else made


def _stacked(data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what ``torch.tensor`` makes of a nested list, as operators of the trace."""
    return _stack(data, dtype or functools.reduce(torch.promote_types, _dtypes(data)))


def _stack(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.detach().to(dtype)
    if isinstance(data, (list, tuple)):
        return torch.stack([_stack(item, dtype) for item in data])
    return torch.tensor(data, dtype=dtype)


def _dtypes(data: Any) -> list[torch.dtype]:
    if isinstance(data, torch.Tensor):
        return [data.dtype]
    if isinstance(data, (list, tuple)):
        return [dtype for item in data for dtype in _dtypes(item)]
    kinds = {bool: torch.bool, int: torch.int64}
    return [kinds.get(type(data), torch.get_default_dtype())]
