"""Have the backward of a graph take gradients that are missing: None, where autograd makes zeros of them by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from ort_zero.compile.conversion.registry import size_of
from ort_zero.compile.sizes import SymbolReader

_TANGENT = "tangents_"
"""How AOTAutograd names the gradients of a forward's results among the inputs of a backward graph."""


def without_missing_gradients(
    program: Callable[[list[Any]], Any], graph: Graph, symbols: SymbolReader
) -> Callable[[list[Any]], Any]:
    """Return a backward that returns None for all gradients if all gradients of results are None.

    If some are, they count as zeros: all results of a graph lead to the same inputs (:mod:`.result_groups`).

    Args:
        program: runs the backward graph, with a list of its inputs that it empties.
        graph: the backward graph.
        symbols: reads the graph's symbols.
    """
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [(i, node.meta["val"]) for i, node in enumerate(placeholders) if str(node.target).startswith(_TANGENT)]
    number = len(graph.find_nodes(op="output")[0].args[0])

    def run(arguments: list[Any]) -> Any:
        missing = [(index, like) for index, like in tangents if arguments[index] is None]
        if len(missing) == len(tangents):
            arguments.clear()
            return [None] * number
        values = symbols.read(arguments) if missing else ()
        for index, like in missing:
            sizes = symbols.evaluate(map(size_of, like.shape), values)
            arguments[index] = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        return program(arguments)

    return run
