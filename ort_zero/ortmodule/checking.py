"""Compare a graph's first run with PyTorch's, results and gradients, with float64 as the judge.

Both runs read the arguments' own memory through new leaves. So no weight is copied, and no gradient, hook or statistic
of the user's tensors sees the check. The state of torch's generator afterwards is that of before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ort_zero.errors import ExportError
from ort_zero.ortmodule.graphs.capture import CapturedGraph
from ort_zero.ortmodule.graphs.refusals import unnoticed
from ort_zero.runtimes.differences import MOVES, explain_difference, in_float64, moved

Run = Callable[..., Sequence[torch.Tensor]]
"""Runs a graph with all arguments of Dynamo's graph."""


def check(graph: CapturedGraph, run: Run, arguments: Sequence[Any]) -> frozenset[int]:
    """Compare a run with PyTorch's; return the places of arguments that have no gradient in PyTorch.

    Args:
        graph: the graph.
        run: runs it in ONNX Runtime.
        arguments: the arguments of a call.

    Raises:
        ExportError: a result or a gradient differs by more than rounding explains, or the graphs draw otherwise.
    """
    state = torch.get_rng_state()
    with unnoticed():
        try:
            wanted, cotangents = _results(graph, graph.original, arguments)
            drawn = torch.get_rng_state()
            torch.set_rng_state(state)
            results, _ = _results(graph, run, arguments, cotangents)
            if not torch.equal(drawn, torch.get_rng_state()):
                raise ExportError("the graph draws other random numbers than PyTorch")
            torch.set_rng_state(state)
            difference = _difference(graph, results, wanted, arguments, cotangents)
        finally:
            torch.set_rng_state(state)
    if difference is not None:
        raise ExportError(f"ONNX Runtime computes something else than PyTorch: {difference}")
    of_inputs = wanted[len(graph.differentiable) :]
    return frozenset(place for place, gradient in zip(_leaves(arguments), of_inputs) if gradient is None)


def _results(
    graph: CapturedGraph, run: Run, arguments: Sequence[Any], cotangents: Sequence[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Return results and gradients of a run on leaves that share the arguments' memory, and the gradients of results.

    Args:
        graph: the graph.
        run: runs the graph.
        arguments: the arguments of a call.
        cotangents: gradients of the results that have one; None makes them.
    """
    leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments]
    results: list[Any] = list(run(*leaves))
    if not graph.is_training:
        return results, []
    roots = [result for result, has_gradient in zip(results, graph.differentiable, strict=True) if has_gradient]
    if cotangents is None:
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype) for root in roots]
    else:
        cotangents = [cotangent.to(root.dtype) for cotangent, root in zip(cotangents, roots)]
    inputs = [leaves[place] for place in _leaves(arguments)]
    gradients = torch.autograd.grad(roots, inputs, cotangents, allow_unused=True) if inputs else ()
    return [*(result.detach() for result in results), *gradients], list(cotangents)


def _leaves(arguments: Sequence[Any]) -> list[int]:
    return [place for place, each in enumerate(arguments) if isinstance(each, torch.Tensor) and each.requires_grad]


def _difference(
    graph: CapturedGraph,
    results: Sequence[torch.Tensor | None],
    wanted: Sequence[torch.Tensor | None],
    arguments: Sequence[Any],
    cotangents: Sequence[torch.Tensor],
) -> str | None:
    """Return how results and gradients differ from PyTorch's, in words; None if rounding explains all."""
    pairs = [index for index, value in enumerate(wanted) if value is not None]
    missing = [index for index in pairs if results[index] is None]
    if missing:
        return f"gradient {missing[0] - len(graph.differentiable)} is missing"
    wrong = next((i for i in pairs if results[i].dtype is not wanted[i].dtype), None)  # type: ignore[union-attr]
    if wrong is not None:
        return f"result {wrong} is of {results[wrong].dtype}, not {wanted[wrong].dtype}"  # type: ignore[union-attr]
    draws = graph.draws.make(arguments)  # as in the run: the generator is in the state that it had before

    def of(run: fx.GraphModule, move: Callable[[Any], Any]) -> list[torch.Tensor]:
        values = _results(graph, lambda *inputs: run(*inputs, *map(move, draws)), [*map(move, arguments)], cotangents)
        return [values[0][index] for index in pairs]  # type: ignore[misc]

    def judges() -> tuple[list[torch.Tensor], Iterator[list[torch.Tensor]]]:
        exact = of(in_float64(graph.plain), lambda a: _like(a, a.double()) if _is_real(a) else a)
        return exact, (of(graph.plain, functools.partial(_moved, factor=factor)) for factor in MOVES)

    return explain_difference([results[i] for i in pairs], [wanted[i] for i in pairs], judges)  # type: ignore[misc]


def _moved(value: Any, factor: int) -> Any:
    return _like(value, moved(value.detach(), factor)) if _is_real(value) else value


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(original.requires_grad)
