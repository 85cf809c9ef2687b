"""Follows the views of tensors while a module is traced, and finds changes in place that the exporter would lose.

Torch's exporter turns changes in place into new values. It follows slices and single rows of a tensor, but neither
other views of it, such as a transposed one or a slice of a slice, nor views that were taken before the change and are
used after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_SLICES = frozenset({torch.Tensor.select, torch.select, torch.Tensor.__getitem__})
_ASSIGNING = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__ifloordiv__",
                        "__iand__", "__ior__", "__ixor__", "__imod__"})  # fmt: skip
_NO_CHANGE = frozenset({"requires_grad_", "retain_grad", "share_memory_", "pin_memory_"})

PUTS_DATA = "puts other data into a tensor"
"""The problem with ``weight.data = tensor``."""


class Views:
    """The views of tensors that a trace has seen."""

    def __init__(self) -> None:
        self._followed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each view, whether the exporter follows it: whether it is a slice of a whole tensor."""
        self._outdated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._slices: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each slice of a whole tensor: the tensor and the index."""

    def slice_of(self, view: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
        """Return the whole tensor that `view` is a slice of, and the index; None for anything else."""
        return self._slices.get(view)

    def problem(self, func: Any, args: tuple, kwargs: dict) -> str | None:
        """Return what a function is about to do that the exporter would lose, None for nothing of the kind."""
        if self._outdated and any(t in self._outdated for t in _tensors([*args, *kwargs.values()])):
            return "uses a view of a tensor that was changed in place after the view was taken"
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            return PUTS_DATA
        target = changed_by(func, args, kwargs)
        if target is None or (target._base is None and target not in self._followed):
            return None
        # the result of a layer may be a view of what the layer alone has seen: that is a whole tensor for the exporter
        assigns = func is torch.Tensor.__setitem__ and target in self._followed and target not in self._slices
        if assigns or not self._followed.get(target, True):
            return "changes a view of a tensor in place"
        return None

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Note the views that a function has returned, and those that its change in place has outdated."""
        target = changed_by(func, args, kwargs)
        if target is not None:
            base = target._base if target._base is not None else target
            for view in list(self._followed):
                # what is assigned to a part of a slice is recorded as a change of the whole tensor
                changed = view is target and func is not torch.Tensor.__setitem__
                if not changed and view._base is base:
                    self._outdated[view] = True
            return
        if func is torch.Tensor.detach or getattr(func, "__self__", None) is torch.Tensor.data:
            self._followed[result] = False
            return
        arguments = {id(t): t for t in _tensors([*args, *kwargs.values()])}
        given = {id(base) for t in arguments.values() for base in (t, t._base)}
        for tensor in _tensors([result]):
            if id(tensor) in arguments:
                continue  # dropout that is switched off returns its argument
            # a view of what only the function has seen is as good as a whole tensor
            if tensor._base is not None and tensor not in self._followed and id(tensor._base) in given:
                of_whole = args and isinstance(args[0], torch.Tensor) and args[0]._base is None
                followed = bool(of_whole) and func in _SLICES and not _adds_axes(func, args)
                self._followed[tensor] = followed
                if followed:
                    self._slices[tensor] = args[:2] if func is torch.Tensor.__getitem__ else _of_row(*args, **kwargs)


def _of_row(tensor: torch.Tensor, dim: int, index: int) -> tuple[torch.Tensor, Any]:
    """Return the tensor and the index of what ``tensor.select(dim, index)`` returns."""
    return tensor, (*[slice(None)] * (dim % tensor.dim()), index)


def changed_by(func: Any, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Return the tensor that a function changes in place; None if it changes none."""
    name = getattr(func, "__name__", "")
    if name in _NO_CHANGE:
        return None
    in_place = name in _ASSIGNING or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    if in_place and args and isinstance(args[0], torch.Tensor):
        return args[0]
    out = kwargs.get("out")
    return out if isinstance(out, torch.Tensor) else None


def _adds_axes(func: Any, args: tuple) -> bool:
    if func is not torch.Tensor.__getitem__:
        return False
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(part is None for part in parts)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
