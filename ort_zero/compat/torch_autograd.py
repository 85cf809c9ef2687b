"""What torch's autograd engine knows of the backward that runs at the moment, through names that are not public."""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef


def current_backward() -> int:
    """Return the number of the backward that runs on this thread, -1 if none does."""
    return torch._C._current_graph_task_id()


class LeafInGraph:
    """A leaf tensor that an autograd graph reads, held as long as the graph holds it."""

    def __init__(self, leaf: torch.Tensor):
        self._leaf = TensorWeakRef(leaf)

    def alive(self) -> bool:
        """Return True while somebody may still run a backward down to the leaf."""
        return self._leaf() is not None

    def in_current_backward(self) -> bool:
        """Return True if the backward that runs at the moment comes, or came, to the leaf."""
        leaf = self._leaf()
        if leaf is None or current_backward() == -1:
            return False
        with torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(leaf).node
        return torch._C._will_engine_execute_node(node)
