"""Prepare a graph of Dynamo for the exporter: tensors alone go in and come out, and sizes are read from tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ort_zero.compat import torch_graphs
from ort_zero.compat.torch_graphs import SizeReader
from ort_zero.compat.transformers_gelu import replace_gelus
from ort_zero.errors import ExportError
from ort_zero.ortmodule.graphs import draws, refusals, rewrites
from ort_zero.ortmodule.graphs.values import axes_of, value_of
from ort_zero.runtimes.memory_order import dense_order

_ARITHMETIC = frozenset(
    getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "iadd", "imul", "isub", "itruediv", "pow")
)
_EXTRACTIONS = frozenset(("item", "tolist", "__bool__", "__int__", "__float__"))


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph of Dynamo in two forms: as PyTorch runs it, and as a module that the exporter traces."""

    original: fx.GraphModule
    """The graph as Dynamo captured it, called with all arguments."""
    plain: fx.GraphModule
    """The graph as captured, but for its draws, which are further arguments: float64's form is the judge."""
    module: nn.Module
    """The graph without random operators: takes the tensors of :meth:`inputs`, returns a tuple of :attr:`computed`."""
    computed: tuple[int, ...]
    """Numbers of the results that `module` returns."""
    rest: fx.GraphModule | None
    """Computes the other results from all arguments, in PyTorch; None if there are none."""
    places: tuple[int, ...]
    """Places of the tensors among the arguments."""
    sizes: SizeReader
    """Reads the sizes that change from the arguments of a call."""
    draws: draws.Draws
    """Makes the draws of a call: advances torch's generator as `original` does."""
    input_axes: tuple[dict[int, str], ...]
    """For each input of `module`, a name for each size that changes; equal sizes have equal names."""
    result_axes: tuple[dict[int, str], ...]
    """For each result of `module`, a name for each size that changes."""
    orders: tuple[tuple[int, ...] | None, ...]
    """For each result of `module`, the order in which its dimensions lie in memory in PyTorch."""
    differentiable: tuple[bool, ...]
    """For each result, whether the result has a gradient."""
    is_observed: bool
    """Whether statistics look into the graph."""
    is_training: bool
    """Whether the graph has a backward."""

    def inputs(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the inputs of `module` for a call: the tensors among the arguments, then the draws."""
        return [*(arguments[place] for place in self.places), *self.draws.make(arguments)]


def capture(original: fx.GraphModule, is_observed: bool = False) -> CapturedGraph:
    """Return a graph of Dynamo in the forms that this engine runs.

    Args:
        original: the graph.
        is_observed: statistics look into the graph, by autograd Functions.

    Raises:
        ExportError: ONNX Runtime cannot run the graph, with what and the way out.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(original.graph, {}))
    output = original.graph.find_nodes(op="output")[0]
    results = output.args[0]
    if not isinstance(results, (tuple, list)) or not all(isinstance(value_of(r), torch.Tensor) for r in results):
        raise ExportError("a graph that returns numbers runs in PyTorch; return tensors from the module")
    holders = graph.find_nodes(op="placeholder")
    places = tuple(place for place, node in enumerate(holders) if isinstance(value_of(node), torch.Tensor))
    refusals.refuse_nested(graph)
    _keep_numbers_as_tensors(graph)
    sizes = SizeReader([value_of(node) for node in holders])
    drawn = draws.take_out(graph, sizes)
    plain = _with_results(fx.GraphModule(original, graph), range(len(results)))
    replace_gelus(fx.GraphModule(original, graph))  # upstream's memory optimizer knows a GELU of one node
    rewrites.apply(graph)
    _read_sizes_from_tensors(graph, holders)
    module = fx.GraphModule(original, graph)
    in_torch = refusals.refuse_by_fake_run(module, [value_of(node) for node in holders], drawn.fakes())
    computed = tuple(index for index in range(len(results)) if index not in in_torch)
    if not computed:
        raise ExportError("each result is a view of an argument, or a constant")
    names: dict[Any, str] = {}
    fakes = [value_of(holders[place]) for place in places]
    differentiable = tuple(value_of(result).requires_grad for result in results)
    return CapturedGraph(
        original=original,
        plain=plain,
        module=_OfTensors(_with_results(module, computed), places, len(holders)),
        computed=computed,
        rest=_with_results(original, in_torch) if in_torch else None,
        places=places,
        sizes=sizes,
        draws=drawn,
        input_axes=tuple(axes_of(fake, names) for fake in (*fakes, *drawn.fakes())),
        result_axes=tuple(axes_of(value_of(results[index]), names) for index in computed),
        orders=tuple(dense_order(value_of(results[index])) for index in computed),
        differentiable=differentiable,
        is_observed=is_observed,
        is_training=torch.is_grad_enabled() and any(differentiable[index] for index in computed),
    )


def _with_results(module: fx.GraphModule, numbers: Sequence[int]) -> fx.GraphModule:
    """Return a graph that computes some of a graph's results, with the same arguments."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(module.graph, {})
    if len(numbers) < len(results):
        graph.output(tuple(results[number] for number in numbers))
        graph.eliminate_dead_code()
    else:
        graph.output(tuple(results))
    return fx.GraphModule(module, graph)


class _OfTensors(nn.Module):
    """A graph whose arguments are the tensors alone: numbers are read from tensors inside the graph.

    Args:
        graph: the graph.
        places: places of the tensors among the graph's arguments.
        total: number of the graph's arguments, without the draws that follow.
    """

    def __init__(self, graph: fx.GraphModule, places: Sequence[int], total: int):
        super().__init__()
        self.graph, self.places, self.total = graph, tuple(places), total

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments: list[Any] = [0] * self.total
        for place, tensor in zip(self.places, tensors):
            arguments[place] = tensor
        return tuple(self.graph(*arguments, *tensors[len(self.places) :]))


def _keep_numbers_as_tensors(graph: fx.Graph) -> None:
    """Have arithmetic read the tensor in which Dynamo passes a number.

    Raises:
        ExportError: anything but arithmetic takes a number out of a tensor.
    """
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _EXTRACTIONS:
            for user in node.users:
                if user.op != "call_function" or user.target not in _ARITHMETIC:
                    raise ExportError(
                        f"{torch_graphs.line_of(user)} takes a number out of a tensor, which would be fixed in the "
                        "graph; compute with the tensor itself"
                    )
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _read_sizes_from_tensors(graph: fx.Graph, holders: Sequence[fx.Node]) -> None:
    """Replace the numbers that Dynamo passes for sizes by ``tensor.size(dim)``, which the exporter traces.

    Raises:
        ExportError: no tensor among the arguments has the size.
    """
    tensors = [node for node in holders if isinstance(value_of(node), torch.Tensor)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in holders:
        number = value_of(node)
        if isinstance(number, torch.Tensor) or not node.users:
            continue
        source = next(
            (
                (tensor, dim)
                for tensor in tensors
                for dim, size in enumerate(value_of(tensor).shape)
                if isinstance(number, torch.SymInt)
                and isinstance(size, torch.SymInt)
                and torch_graphs.expression_of(size) == torch_graphs.expression_of(number)
            ),
            None,
        )
        if source is None:
            raise ExportError(f"the number {number} changes and is the size of no tensor; pass it as a tensor")
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.call_method("size", source))
