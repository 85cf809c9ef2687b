"""What torch's autograd engine knows of the backward that runs at the moment, through names that are not public."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef


def current_backward() -> int:
    """Return the number of the backward that runs on this thread, -1 if none does."""
    return torch._C._current_graph_task_id()


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
