"""Hold the graph passes of who observes values in compiled units: statistics hand theirs over, engines call them."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node


class Unobserved:
    """The passes while nobody observes values; a module with functions of these names can take their place."""

    @staticmethod
    def is_observation(node: Node) -> bool:
        """Return True for a call that reads a value and changes nothing, which no engine runs or moves."""
        return False

    @staticmethod
    def follow_gradients(module: GraphModule) -> None:
        """Add to a graph of Dynamo what its backward needs to meet the gradients of observed tensors."""

    @staticmethod
    def remove_pass_throughs(graph: Graph) -> None:
        """Take out of a joint or an inference graph what :meth:`follow_gradients` has added."""

    @staticmethod
    def erase_from_backward(backward: Graph) -> None:
        """Erase the forward's observations that the partitioner has copied into a backward graph."""


passes: list[Any] = [Unobserved]
"""The last one's functions are called."""
