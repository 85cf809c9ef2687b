"""Watches a module while torch's tracer records it, and corrects what the tracer gets wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COMPARISONS = frozenset(
    {torch.Tensor.ne, torch.Tensor.eq, torch.ne, torch.eq, torch.Tensor.__eq__, torch.Tensor.__ne__}
)


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _COMPARISONS:
            # the exporter's passes know no comparison of a tensor with a Python bool
            args = tuple(int(a) if isinstance(a, bool) else a for a in args)
        result = func(*args, **(kwargs or {}))
        _correct(result)
        return result


def _correct(result: Any) -> None:
    """Note in the trace which results have a gradient; the tracer forgets it for convolutions."""
    if isinstance(result, torch.Tensor):
        if result.requires_grad:
            value = torch._C._get_value_trace(result)
            if not value.requiresGrad():
                value.inferTypeFrom(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            _correct(item)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watch the module that runs inside, if it is being traced."""
    if not torch.jit.is_tracing():
        yield
        return
    with _Watch():
        yield
