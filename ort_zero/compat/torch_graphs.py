"""Read what torch notes of the values and operators in captured graphs, where that has no public name (2.6 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ("HigherOrderOperator", "TorchDispatchMode")


def expression_of(size: torch.SymInt) -> Any:
    """Return the expression of sympy that stands for a size."""
    return size.node.expr


@contextmanager
def fake_mode_of(tensors: Iterable[Any]) -> Iterator[None]:
    """Enter the mode in which fake tensors were made, or a new one; tensors with values may be among the operands."""
    mode = next((tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode")), None) or FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share which share memory, also fake ones."""
    return tensor.untyped_storage()._cdata


def name_of(operator: Any) -> str:
    """Return the name of an ATen operator without namespace and overload: ``add``."""
    return operator._schema.name.partition("::")[2]


def is_random(operator: Any) -> bool:
    """Return True for an operator that draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def line_of(node: Node) -> str:
    """Return the line of the user's code that a node of a captured graph comes from, or the node's name."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    return trace[-1] if trace else node.name


def flops_of(module: GraphModule, fakes: Sequence[Any]) -> int:
    """Return the floating-point operations of a run, by torch's counter; symbolic sizes have their first values.

    Args:
        module: the graph.
        fakes: fake tensors and symbolic numbers for the graph's arguments.
    """
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), fake_mode_of(fakes), counter:
            module(*fakes)
    except Exception:  # an operator without a fake kernel
        return 0
    total = counter.get_total_flops()
    return total if isinstance(total, int) else int(total.node.hint)
