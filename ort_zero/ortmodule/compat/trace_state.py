"""Changes torch's tracer for a block: hides it, keeps it alive, or undoes what a trace needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ort_zero.ortmodule.compat.replaced_methods import called_method

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


class _SavedTensors(threading.local):
    """The pairs of functions with which :func:`saved_through` has replaced what autograd saves, of each thread."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


_saved_tensors = _SavedTensors()


@contextlib.contextmanager
def saved_through(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Let autograd save what `pack` returns in the block, but not in blocks of :func:`plain_autograd` in it."""
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _saved_tensors.pairs.append((pack, unpack))
        try:
            yield
        finally:
            _saved_tensors.pairs.pop()


@contextlib.contextmanager
def plain_autograd() -> Iterator[bool]:
    """Take away the hooks of :func:`saved_through` in the block, in which code may compute gradients.

    Yields:
        Whether they were the innermost ones, as while a trace is made; otherwise nothing is changed.
    """
    # inside of an operator that is traced the state is hidden, and the hooks are there
    hooks = _innermost_hooks()
    if hooks is None or hooks not in _saved_tensors.pairs:
        yield False
        return
    _C._autograd._pop_saved_tensors_default_hooks()
    _saved_tensors.pairs.remove(hooks)
    try:
        yield True
    finally:
        _saved_tensors.pairs.append(hooks)
        _C._autograd._push_saved_tensors_default_hooks(*hooks)


def _innermost_hooks() -> tuple[Any, Any] | None:
    """Return the pair that autograd would save with; where torch does not tell (2.6 and before), the last of ours."""
    top = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return _saved_tensors.pairs[-1] if _saved_tensors.pairs else None
    found = top(False)
    return None if found is None else tuple(found)


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
        func = called_method(func)
        if "grouped_mm" in getattr(func, "__name__", ""):
            args = tuple(a.contiguous() if isinstance(a, torch.Tensor) and 0 in a.stride() else a for a in args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def dense_operands() -> Iterator[None]:
    """Let operators that check strides accept fake weights, one element expanded to the shape of a weight."""
    with _DenseOperands():
        yield
