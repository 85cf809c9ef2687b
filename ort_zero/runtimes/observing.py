"""Hold the graph passes of statistics, which engines call on the graphs of units without importing statistics."""

from __future__ import annotations

from typing import Protocol

from torch.fx import Graph, GraphModule, Node


class GraphPasses(Protocol):
    """The functions of :mod:`ort_zero.statistics.collect.graph_operators` that engines call."""

    def is_observation(self, node: Node) -> bool:
        """Return True for a call that reads a value and changes nothing; no engine runs or moves such a call."""

    def follow_gradients(self, module: GraphModule) -> None:
        """Add to a graph of Dynamo what its backward needs to meet the gradients of observed tensors."""

    def remove_pass_throughs(self, graph: Graph) -> None:
        """Take out of a joint or an inference graph what `follow_gradients` has added."""

    def erase_from_backward(self, backward: Graph) -> None:
        """Erase the observations that the partitioner has copied into a backward."""

    def observe_operators(self, graph: Graph, direction: str) -> None:
        """Have a graph show what each operator takes and returns, if the next step is recorded."""


passes: list[GraphPasses] = []
"""The passes of statistics, from the first model on that collects statistics; empty before."""


def is_observation(node: Node) -> bool:
    """Return True for a call that observes a value."""
    return any(each.is_observation(node) for each in passes)
