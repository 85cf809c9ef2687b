"""Run a divided training graph as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import torch
from torch.autograd.function import once_differentiable

from ort_zero.compat import compiled_backward
from ort_zero.errors import ExportError
from ort_zero.ortmodule.division import Division, divide
from ort_zero.ortmodule.upstream.building import BuiltGraph
from ort_zero.ortmodule.upstream.sessions import Session
from ort_zero.runtimes.memory_order import in_order


class Halves:
    """The sessions of a training graph's forward and backward.

    Args:
        built: the training graph.
        inputs: the inputs of a call; parameters among them are weights.
        differentiable: for each result, whether the result has a gradient in PyTorch.
        orders: for each result, the order in which its dimensions lie in memory in PyTorch.
        note_backward: called with each backward.

    Raises:
        ExportError: a result has a gradient in PyTorch alone.
    """

    def __init__(
        self,
        built: BuiltGraph,
        inputs: Sequence[torch.Tensor],
        differentiable: Sequence[bool],
        orders: Sequence[tuple[int, ...] | None],
        note_backward: Callable[[], None],
    ):
        without = {index for index, has_gradient in enumerate(differentiable) if not has_gradient}
        if built.without_gradient - without:
            raise ExportError(f"result {min(built.without_gradient - without)} has no gradient in ONNX Runtime")
        self.non_differentiable = frozenset(without)
        self.orders = orders
        self.note_backward = note_backward
        division = divide(built.model, _weights(built, inputs))
        self.forward = Session(division.forward, built.is_optimized)
        self.backward = Session(division.backward(self.forward.types()), built.is_optimized)
        self.kept_bytes = 0
        """Bytes that the newest forward has kept for its backward, without inputs."""
        outputs = {name: index for index, name in enumerate(self.forward.outputs)}
        self.feeds = [built.places[name] for name in self.forward.inputs]
        """Places of the inputs that the forward reads."""
        self.results = [outputs[name] for name in division.results]
        self.kept = [outputs[name] for name in division.kept]
        self.saved_inputs = [built.places[name] for name in division.inputs_again]
        """Places of the inputs that the backward reads."""
        self.sources = _sources(self.backward, division)
        """For each input of the backward: 0 for a gradient, 1 for a kept value, 2 for an input; and its number."""
        numbers = {name: index for index, name in enumerate(self.backward.outputs)}
        of_outputs = [numbers[name] for name in division.backward_outputs]
        self.gradients = {place: of_outputs[index] for place, index in built.gradients.items()}
        """For each input with a gradient, by its place: the number of the backward's output."""

    def leave_out(self, places: Iterable[int]) -> None:
        """Have inputs get no gradient, as in PyTorch, where ONNX Runtime computes one of zeros."""
        for place in places:
            self.gradients.pop(place, None)


def _weights(built: BuiltGraph, inputs: Sequence[torch.Tensor]) -> frozenset[str]:
    return frozenset(name for name, place in built.places.items() if isinstance(inputs[place], torch.nn.Parameter))


def kept_bytes(built: BuiltGraph, inputs: Sequence[torch.Tensor], model: onnx.ModelProto) -> int:
    """Return the bytes that the forward of `model`, a form of the built graph, keeps for its backward in a call."""
    division = divide(model, _weights(built, inputs))
    session = Session(division.forward, is_optimized=True)
    outputs = dict(zip(session.outputs, session.run([inputs[built.places[name]] for name in session.inputs])))
    return sum(outputs[name].nbytes for name in division.kept)


def in_orders(results: Sequence[torch.Tensor], orders: Sequence[tuple[int, ...] | None]) -> list[torch.Tensor]:
    """Return a session's results as they lie in memory in PyTorch: a dropout that reads one draws in that order."""
    return [result if order is None else in_order(result, order) for result, order in zip(results, orders, strict=True)]


def _sources(backward: Session, division: Division) -> list[tuple[int, int]]:
    kinds = (division.gradients, division.kept, division.inputs_again)
    sources = {
        name: (kind, division.gradients[name] if kind == 0 else index)
        for kind, names in enumerate(kinds)
        for index, name in enumerate(names)
    }
    return [sources[name] for name in backward.inputs]


class OrtGraphFunction(torch.autograd.Function):
    """The autograd Function of all training graphs.

    Autograd saves what the forward keeps, and the inputs that the backward reads. So hooks of saved tensors see them,
    as activation checkpointing's do. A weight is whole again when the backward reads it.
    """

    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the forward; returns the graph's results."""
        outputs = halves.forward.run([inputs[place] for place in halves.feeds])
        results = tuple(in_orders([outputs[index] for index in halves.results], halves.orders))
        kept = [outputs[index] for index in halves.kept]
        halves.kept_bytes = sum(tensor.nbytes for tensor in kept)
        ctx.halves, ctx.before = halves, compiled_backward.running.before
        ctx.shapes = [(result.shape, result.dtype) for result in results]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *(inputs[place] for place in halves.saved_inputs))
        ctx.mark_non_differentiable(*(results[index] for index in halves.non_differentiable))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Run the backward; returns the gradients of the inputs."""
        halves: Halves = ctx.halves
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        if ctx.before is not None:
            ctx.before()
        halves.note_backward()
        saved = ctx.saved_tensors
        kept, inputs = saved[: len(halves.kept)], saved[len(halves.kept) :]

        def run(of_results: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
            sources: tuple[Sequence[Any], ...] = (of_results, kept, inputs)
            outputs = halves.backward.run([sources[kind][index] for kind, index in halves.sources])
            of_inputs: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
            for place, index in halves.gradients.items():
                of_inputs[place + 1] = outputs[index]
            return tuple(of_inputs)

        whole = [
            torch.zeros(shape, dtype=dtype) if gradient is None else gradient
            for gradient, (shape, dtype) in zip(gradients, ctx.shapes, strict=True)
        ]
        return compiled_backward.run_for_each(run, whole)
