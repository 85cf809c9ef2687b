"""Notices which tensors a block of code writes into, whatever views or aliases it goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BeforeWrites(TorchDispatchMode):
    """Calls a function with each tensor that an operator in the block is about to write into.

    Args:
        note: takes the tensor, which may be an alias of part of another one (``weight.data``, a slice).
        note_failed: takes such a tensor when the operator could not write into it.
    """

    def __init__(self, note: Callable[[torch.Tensor], None], note_failed: Callable[[torch.Tensor], None]):
        super().__init__()
        self._note = note
        self._note_failed = note_failed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the method below: that imports the compiler, seconds in the first trace.

        Nothing compiles what is traced, see :func:`ort_zero.ortmodule.compat.torch_compile.not_compiled`.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        written = list(_written(func._schema.arguments, args, kwargs))
        for tensor in written:
            self._note(tensor)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            for tensor in written:
                self._note_failed(tensor)
            raise


def _written(arguments: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
