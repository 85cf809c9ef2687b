"""Make PyTorch's form of a segment: the same FX nodes as a module of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ort_zero.compile.plan import Segment
from ort_zero.units.placement import differences

_VIEW = torch.ops.aten.view.default
_RESHAPE = torch.ops.aten.reshape.default


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
    exact = differences.in_float64(module)
    return list(exact(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)))


def with_moved_inputs(module: GraphModule, inputs: list[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield the results of several runs of a segment whose float inputs are moved by a few roundings, up or down."""
    for factor in differences.MOVES:
        yield list(module(*(differences.moved(value, factor) for value in inputs)))
