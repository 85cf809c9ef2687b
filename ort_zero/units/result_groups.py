"""Divide a graph of Dynamo where its inputs have gradients of different results: an auxiliary head, an early exit.

AOTAutograd makes one autograd node of a graph. Whichever result a loss uses, the node then has gradients for all
inputs, zeros where PyTorch has none: an optimizer's decay and momentum move weights that PyTorch leaves alone. Parts
whose operations all lead to the same results have a node each, and autograd finds the nodes that a loss depends on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from ort_zero.compat.torch_compile import tree_leaves
from ort_zero.compat.torch_graphs import copy_sizes, is_size
from ort_zero.errors import ExportError
from ort_zero.runtimes import observing

_MAX_PARTS = 16
"""Parts of a graph from which PyTorch runs the unit; a decoder's layer whose keys and values are results has eight."""


def divided(module: GraphModule) -> GraphModule | None:
    """Return a module that calls parts of a graph in order, as submodules; None where one graph is right.

    Raises:
        ExportError: the graph would have many parts, or statistics look into it, whose operators belong together.
    """
    nodes = list(module.graph.nodes)
    results = {node for node in tree_leaves(nodes[-1].args) if isinstance(node, Node) and _needs_gradient(node)}
    leads_to = _results_of(nodes, results)
    if len(results) < 2 or all(leads_to[node] in (set(), results) for node in nodes if node.op == "placeholder"):
        return None
    copy_sizes(module)
    nodes = list(module.graph.nodes)
    leads_to = _results_of(nodes, results)
    # an input of a part has a gradient if any result of the part has one: no result may lead further than an input
    parts: dict[Node, int] = {}
    number, of_part, limit = 0, set[Node](), results
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_size(node):
            continue
        read = [leads_to[each] for each in node.all_input_nodes if each.op in ("placeholder", "get_attr")]
        of_inputs = set.intersection(results, *filter(None, read))
        if leads_to[node] and not of_part | leads_to[node] <= limit & of_inputs:
            number, of_part, limit = number + 1, set(), results
        if leads_to[node]:
            of_part, limit = of_part | leads_to[node], limit & of_inputs
        parts[node] = number
    parts.update((node, parts.get(user, 0)) for node in nodes if is_size(node) for user in node.users)
    is_observed = any(map(observing.is_observation, nodes))
    if number >= _MAX_PARTS or is_observed:
        why = "statistics look into it" if is_observed else f"in more than {_MAX_PARTS} parts"
        raise ExportError(f"some of its parameters have gradients of some of its results alone, and {why}")
    return split_module(module, module, lambda node: parts.get(node, 0), keep_original_order=True)


def compile_parts(
    whole: GraphModule, inputs: Sequence[Any], compile_part: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile the parts of a divided graph, and return a function that runs them in order.

    Args:
        compile_part: compiles a graph that returns a tuple.
    """
    values = dict(zip(whole.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in whole.graph.nodes:
        if node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        if node.op != "call_module":
            continue
        part: Any = whole.get_submodule(str(node.target))
        output = part.graph.find_nodes(op="output")[0]
        returned = output.args[0]
        values[node] = torch.fx.map_arg(returned, lambda each: each.meta["example_value"])
        if not isinstance(returned, tuple):
            output.args = ((returned,),)
            part.recompile()
        examples = [values[each] for each in node.args]
        setattr(whole, str(node.target), _Part(compile_part(part, examples), isinstance(returned, tuple)))
    return whole.forward


class _Part(torch.nn.Module):
    """Calls a compiled part, and returns what the part returned before it was compiled."""

    def __init__(self, compiled: Callable[..., Any], returns_tuple: bool):
        super().__init__()
        self.compiled, self.returns_tuple = compiled, returns_tuple

    def forward(self, *inputs: Any) -> Any:
        results = self.compiled(*inputs)
        return tuple(results) if self.returns_tuple else results[0]


def _results_of(nodes: Sequence[Node], results: set[Node]) -> dict[Node, set[Node]]:
    """Return the results whose gradients each node's gradient is made of."""
    leads_to: dict[Node, set[Node]] = {}
    for node in reversed(nodes):
        users = (leads_to[user] for user in node.users) if _needs_gradient(node) else ()
        leads_to[node] = set().union(*users, {node} & results)
    return leads_to


def _needs_gradient(node: Node) -> bool:
    values = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
