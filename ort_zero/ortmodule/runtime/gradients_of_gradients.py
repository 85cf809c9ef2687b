"""Lets PyTorch compute the gradients of a call that are to be differentiated themselves (``create_graph=True``).

ONNX Runtime has no gradient of a gradient. PyTorch runs the module again on the arguments of the call, and autograd
records what it computes; the call itself, and a plain backward through it, stay with ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.ortmodule.runtime import calls_in_torch
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.submodule_graphs import all_in_torch

_REFUSED = (
    "create_graph=True asks for the gradient of a gradient (a gradient penalty, forces of an energy, second-order "
    "optimizers), which ONNX Runtime does not have, and PyTorch cannot compute it for this graph: {why}. Let PyTorch "
    "run that call, by calling the user's own module (engine.module.module(...), or the model that the engine was "
    "given), or leave out create_graph=True if nothing differentiates the result"
)


def refused(why: str) -> str:
    """Return the message of an error for a call whose gradients PyTorch cannot compute."""
    return _REFUSED.format(why=why)


def gradients_in_torch(
    module: torch.nn.Module,
    graph: BuiltGraph,
    call: pytree.Call,
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    note: Callable[[], None],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs that autograd sees, with the graph of their own computation.

    Args:
        module: the user's module.
        graph: has run the call.
        call: the call, taken apart.
        inputs: of the graph, in its order.
        gradients: of its results, None where the backward has not come from.
        note: called before PyTorch runs the module.

    Raises:
        RuntimeError: PyTorch would compute something else than the graph did.
    """
    why = _obstacle(module, graph)
    if why:
        raise RuntimeError(refused(why))
    note()
    numbers = pytree.number_arguments(call.structure, pytree.parameters_of(module.forward)).values()
    values = [t.item() if i in numbers else t for i, t in enumerate(call.tensors)]
    args, kwargs, known = pytree.unflatten_call(values, call.structure)
    with calls_in_torch.expected(), all_in_torch():
        value = module(*args, **kwargs)
    results, _ = pytree.flatten(value, drop_caches=module.training, known=known)
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=False)
        if gradient is not None and result.requires_grad
    ]
    wanted = [inputs[i] for i in graph.session.differentiable]
    if not pairs:
        return (None,) * len(wanted)
    ends, given = zip(*pairs, strict=True)
    return torch.autograd.grad(ends, wanted, given, create_graph=True, allow_unused=True)


def _obstacle(module: torch.nn.Module, graph: BuiltGraph) -> str:
    """Return why PyTorch would not compute what the graph has computed, empty if it would."""
    effects = graph.effects
    if graph.executor is not None or any(is_partitioned(p) for p in module.parameters()):
        return "its gradients leave the graph one by one (ZeRO-3, memory_efficient_gradients)"
    if effects.writes or effects.left or effects.attributes or graph.known.export.read.inputs:
        return "its forward writes or reads attributes that change"
    if effects.buffers or effects.changed:
        return "its forward changes buffers or arguments"
    return ""
