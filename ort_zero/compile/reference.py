"""Make PyTorch's form of a segment: the same FX nodes as a module of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ort_zero.compile.plan import Segment

_VIEW = torch.ops.aten.view.default
_RESHAPE = torch.ops.aten.reshape.default
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FACTORS = range(0x3504F333, 0x3504F333 + 16 * 0x1234567, 2 * 0x1234567)
"""Odd numbers that spread the bits of a float."""


def reference_of(segment: Segment) -> GraphModule:
    """Return the segment as a module that PyTorch runs: it has the segment's inputs and outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = runnable(node.target)
    graph.output(tuple(copies[node] for node in segment.outputs))
    return GraphModule(torch.nn.Module(), graph)


def runnable(target: Any) -> Callable[..., Any]:
    """Return the function to call for an FX target: a view that was traced can need a copy of other strides."""
    return _RESHAPE if target is _VIEW else target


def in_float64(module: GraphModule, inputs: list[Any]) -> list[torch.Tensor]:
    """Return the results of a segment computed in float64, as the judge between two computations in less."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for holder in ("args", "kwargs"):
            setattr(copies[node], holder, map_aggregate(getattr(copies[node], holder), _wider))
    exact = GraphModule(torch.nn.Module(), graph)
    return list(exact(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)))


def with_moved_inputs(module: GraphModule, inputs: list[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield the results of several runs of a segment whose float inputs are moved by a few roundings, up or down.

    They show how far rounding alone takes the results, as sums in another order do: one run can be near float64 by
    chance. Equal numbers move alike, since a segment may look for the elements that equal the largest. Inputs of 16
    bits stay: PyTorch's rounding to 16 bits is larger.
    """

    def moved(value: Any, factor: int) -> Any:
        bits = _BITS.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if bits is None:
            return value
        return value + value * ((value.view(bits) * factor >> 7) % 3 - 1) * torch.finfo(value.dtype).eps * 4

    for factor in _FACTORS:
        yield list(module(*(moved(value, factor) for value in inputs)))


def _wider(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument
