"""Hold the graph passes of who observes values in compiled units: statistics hand theirs over, engines call them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

passes: list[Any] = []
"""Modules with four functions. ``is_observation(node)`` tells calls that read a value and change nothing, which no
engine runs or moves. ``follow_gradients(module)`` adds to a graph of Dynamo what its backward needs to meet the
gradients of observed tensors. ``remove_pass_throughs(graph)`` takes that out of a joint or an inference graph.
``erase_from_backward(graph)`` erases the observations that the partitioner has copied into a backward."""


def is_observation(node: Node) -> bool:
    """Return True for a call that observes a value."""
    return any(each.is_observation(node) for each in passes)
