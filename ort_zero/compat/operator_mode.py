"""See each operator that PyTorch runs with its tensors, and the autograd nodes behind a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WITHOUT_VALUES = frozenset(
    "_reshape_alias _unsafe_view alias as_strided clone contiguous copy detach empty empty_like empty_strided "
    "lift_fresh new_empty new_empty_strided new_zeros resize set zeros zeros_like".split()
)
"""Operators that compute nothing: views that torch does not call so, copies, new memory."""
_OF_RUNTIMES = frozenset({"_c10d_functional", "c10d", "ort_zero", "prim", "profiler"})


class OperatorMode(TorchDispatchMode):
    """Has ``see(operator, tensors, run)`` run each operator; `tensors` are those among its arguments."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Any, list[torch.Tensor], Callable[[], Any]], Any]):
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        tensors = [leaf for leaf in tree_leaves((args, read)) if isinstance(leaf, torch.Tensor)]
        return self._see(func, tensors, lambda: func(*args, **(kwargs or {})))


def computed_by(function: Any) -> str | None:
    """Return the name of an operator that computes values: ``"aten.add"``, also of the form that works in place."""
    if not isinstance(function, OpOverload) or function.namespace in _OF_RUNTIMES or function.is_view:
        return None
    name = function.overloadpacket.__name__.rstrip("_")
    return None if name in _WITHOUT_VALUES else f"{function.namespace}.{name}"


def next_sequence_number() -> int:
    """Return the number that autograd gives the next node that this thread makes."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def nodes_behind(tensors: Iterable[torch.Tensor], first: int) -> Iterator[tuple[int, Any]]:
    """Yield the autograd nodes behind tensors, from the sequence number `first` on, with their numbers."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < first or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        yield node._sequence_nr(), node
        waiting += [following for following, _ in node.next_functions]
