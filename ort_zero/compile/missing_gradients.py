"""Return no gradient where PyTorch has none: for what only results without a gradient depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ort_zero.compile.conversion.registry import size_of
from ort_zero.compile.sizes import SymbolReader

_TANGENT = "tangents_"
"""How AOTAutograd names the gradients of a forward's results among the inputs of a backward graph."""


def without_missing_gradients(
    program: Callable[[list[Any]], Any], graph: Graph, symbols: SymbolReader
) -> Callable[[list[Any]], Any]:
    """Return a backward that takes None for missing gradients, and returns None where nothing else is to be had.

    Args:
        program: runs the backward graph, with a list of its inputs that it empties.
        graph: the backward graph.
        symbols: reads the graph's symbols.
    """
    placeholders = graph.find_nodes(op="placeholder")
    tangents = {index: node for index, node in enumerate(placeholders) if str(node.target).startswith(_TANGENT)}
    (gradients,) = graph.find_nodes(op="output")[0].args
    sources = _sources(graph, list(tangents.values()))
    needed = [sources.get(gradient, frozenset()) for gradient in gradients]

    def run(arguments: list[Any]) -> Any:
        missing = {node for index, node in tangents.items() if arguments[index] is None}
        if not missing:
            return program(arguments)
        if len(missing) == len(tangents):
            arguments.clear()
            return [None] * len(gradients)
        values = symbols.read(arguments)
        for index, node in tangents.items():
            if arguments[index] is None:
                like = node.meta["val"]
                sizes = symbols.evaluate(map(size_of, like.shape), values)
                arguments[index] = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        results = program(arguments)
        return [None if of and of <= missing else result for of, result in zip(needed, results, strict=True)]

    return run


def _sources(graph: Graph, tangents: list[Node]) -> dict[Any, frozenset[Node]]:
    """Return the tangents that each node depends on."""
    sources: dict[Any, frozenset[Node]] = {node: frozenset((node,)) for node in tangents}
    for node in graph.nodes:
        if node.op == "call_function":
            sources[node] = frozenset().union(*(sources.get(each, frozenset()) for each in node.all_input_nodes))
    return sources
