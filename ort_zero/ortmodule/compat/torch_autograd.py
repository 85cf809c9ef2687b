"""What torch's autograd engine knows of the backward that runs at the moment, through names that are not public."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef


def current_backward() -> int:
    """Return the number of the backward that runs on this thread, -1 if none does."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the backward that runs leaves the graph for another one (``retain_graph=True``).

    True where this torch does not tell.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def leaves_behind(nodes: Iterable[Any]) -> list[torch.Tensor]:
    """Return the leaf tensors to which a backward through `nodes` of autograd's graph would lead."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = set()
    stack = [node for node in nodes if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
        stack += [following for following, _ in node.next_functions if following is not None]
    return leaves


def comes_to(leaf: torch.Tensor) -> bool:
    """Return True if the backward that runs at the moment comes, or came, to the leaf through autograd's graph."""
    if current_backward() == -1:
        return False
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Return True if a Python hook sees the leaf's gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def has_backward_hooks(tensor: torch.Tensor) -> bool:
    """Return True if a Python hook is called before the tensor's gradient is accumulated, even with None."""
    return bool(tensor._backward_hooks)


class LeafInGraph:
    """A leaf tensor that an autograd graph reads, held as long as the graph holds it."""

    def __init__(self, leaf: torch.Tensor):
        self._leaf = TensorWeakRef(leaf)

    def alive(self) -> bool:
        """Return True while somebody may still run a backward down to the leaf."""
        return self._leaf() is not None

    def among(self, leaves: list[torch.Tensor]) -> bool:
        """Return True if it is one of `leaves`."""
        leaf = self._leaf()
        return leaf is not None and any(leaf is other for other in leaves)

    def in_current_backward(self) -> bool:
        """Return True if the backward that runs at the moment comes, or came, to the leaf."""
        leaf = self._leaf()
        return leaf is not None and comes_to(leaf)


class _Exit(torch.autograd.Function):
    """A result without data in place of a tensor; in backward, hands on the gradient that lies in its box."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.box = box
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None


class BackwardEnd:
    """The place of a tensor in autograd's graph, from where a backward can start; it holds no data of the tensor.

    torch 2.8 and before start no backward at a place behind a Function of
    Python code, so that there a result without data stands for the tensor.
    """

    def __init__(self, tensor: torch.Tensor):
        self._box: list[torch.Tensor] = []
        self._start: Any
        if _starts_at_edges():
            self._start = get_gradient_edge(tensor)
        else:
            with torch.enable_grad():
                self._start = _Exit.apply(tensor, self._box)

    def start(self, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return what :func:`torch.autograd.grad` takes as an output and as its gradient."""
        if not isinstance(self._start, torch.Tensor):
            return self._start, gradient
        self._box[:] = [gradient]
        return self._start, torch.zeros_like(self._start)


def gradients(ends: Sequence[BackwardEnd], starts: Sequence[Any], given: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return the gradients at the edges `starts`, None where none comes, for the gradients `given` at `ends`."""
    if not ends:
        return [None] * len(starts)
    outputs, values = zip(*(end.start(value) for end, value in zip(ends, given, strict=True)), strict=True)
    reached = [edge for edge in starts if _is_in_a_graph(edge.node)]
    if not reached:
        return [None] * len(starts)
    found = dict(zip(map(id, reached), torch.autograd.grad(outputs, reached, values, allow_unused=True), strict=True))
    return [found.get(id(edge)) for edge in starts]


def _is_in_a_graph(node: Any) -> bool:
    """Return False for the node of a Python Function that no graph leads to any more.

    The object that Python has holds the node itself from torch 2.13 on; before, a
    backward down to a node that is gone ends the process.
    """
    try:
        return node.next_functions is not None
    except RuntimeError:
        return False


@functools.cache
def _starts_at_edges() -> bool:
    """Return whether this torch starts a backward at the place of a Python Function's result.

    By its version, for trying it ends the process on torch 2.6; 2.8 raises, and 2.13 does it.
    """
    return Version(torch.__version__).release >= (2, 13)
