"""Changes torch's tracer for a block: hides it, keeps it alive, or undoes what a trace needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_C: Any = torch._C


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Hide the tracer from what happens in the block: sizes are plain numbers there, and nothing is recorded."""
    state = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        yield
    finally:
        _C._set_tracing_state(state)


def is_computed(tensor: torch.Tensor) -> bool:
    """Return whether the traced graph computes `tensor`, of more than one element: it is no input, weight, buffer or
    constant."""
    with untraced():
        if tensor.numel() <= 1:
            return False
    return is_in_graph(tensor)


def is_in_graph(tensor: torch.Tensor) -> bool:
    """Return whether an operator of the traced graph computes `tensor`."""
    return _C._get_value_trace(tensor).node().kind() not in ("prim::Param", "prim::Constant")


@contextlib.contextmanager
def plain_autograd() -> Iterator[bool]:
    """Take away the saved-tensor hooks of a trace in the block, in which code may compute gradients.

    Yields:
        Whether a trace is being made; otherwise nothing is changed.
    """
    # inside of an operator that is traced the state is hidden, and the hooks are there
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__name__", "") != KEEPS_NOTHING:
        yield False
        return
    _C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield True
    finally:
        _C._autograd._push_saved_tensors_default_hooks(*hooks)


KEEPS_NOTHING = "keeps_nothing"
"""Name of the hook that drops what autograd saves during a trace."""


@contextlib.contextmanager
def trace_goes_on() -> Iterator[None]:
    """Keep the trace when an operator in the block raises an error, which the model may catch: torch ends it."""
    state = _C._get_tracing_state()
    try:
        yield
    except Exception:
        _C._set_tracing_state(state)
        if state is not None:
            *_, last = state.graph().nodes()
            if last.outputsSize() == 0 and last.kind().startswith("aten::"):
                last.destroy()  # the operator, which has no result
        raise


class _DenseOperands(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "grouped_mm" in getattr(func, "__name__", ""):
            args = tuple(a.contiguous() if isinstance(a, torch.Tensor) and 0 in a.stride() else a for a in args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def dense_operands() -> Iterator[None]:
    """Let operators that check strides accept fake weights, one element expanded to the shape of a weight."""
    with _DenseOperands():
        yield
