"""Give the backwards of AOTAutograd's graphs what PyTorch's own have: missing gradients, and gradients in batches.

Torch gives AOTAutograd's Functions zeros for missing gradients, and they refuse ``vmap`` (torch 2.7 to 2.15:
``_aot_autograd/runtime_wrappers.py``). Their classes are reached from the results of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from ort_zero.utils.patching import replaced

GRAPH_NODE = "CompiledFunction"
"""What the names of the autograd nodes of these graphs begin with."""
_PREPARED, _BEFORE = "_ort_zero_prepared", "_ort_zero_before"
Backward = Callable[[list[Any]], Sequence[Any]]


class _Running(threading.local):
    before: Callable[[], None] | None = None


running = _Running()
"""What the backwards of the graphs that run in this thread call first."""


def prepare_backward(results: Iterable[Any]) -> bool:
    """Have the backward of the graph that made `results` take missing gradients, and gradients in batches.

    It calls ``running.before`` first. Returns True if a graph with a backward made a result, or the base of a view.
    """
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        for each in (node, *(edge for edge, _ in getattr(node, "next_functions", ())[:1])):
            if each is not None and each.name().startswith(GRAPH_NODE) and hasattr(each, "_forward_cls"):
                each.set_materialize_grads(False)
                _prepare(each._forward_cls)
                setattr(each, _BEFORE, running.before)
                return True
    return False


def _prepare(function: Any) -> None:
    """Replace forward and backward of the autograd Function of a graph, once."""
    if _PREPARED in vars(function):
        return
    forward, backward = function.forward, function.backward

    def without_zeros(ctx: Any, *arguments: Any) -> Any:
        ctx.set_materialize_grads(False)
        return forward(ctx, *arguments)

    def as_in_pytorch(ctx: Any, *gradients: Any) -> Any:
        before = getattr(ctx, _BEFORE, None)
        if before is not None:
            before()
        boxed = bool(gradients) and isinstance(gradients[0], list)  # from torch 2.12 on, in a list to be emptied
        values = list(gradients[0]) if boxed else list(gradients)

        def run(one: list[Any]) -> Sequence[Any]:
            return backward(ctx, one) if boxed else backward(ctx, *one)

        # all results of a graph lead to the same inputs (units/result_groups.py)
        if all(value is None for value in values):
            return (None,) * len(ctx.needs_input_grad)
        for index, like in enumerate(ctx._input_metadata):
            if values[index] is None:
                values[index] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if not are_batched(values):
            return run(values)
        with replaced(ctx, "maybe_clear_saved_tensors", lambda _: lambda: None):
            return _one_by_one(run, values)

    function.forward, function.backward = staticmethod(without_zeros), staticmethod(as_in_pytorch)
    setattr(function, _PREPARED, True)


def are_batched(gradients: Iterable[Any]) -> bool:
    """Return True for gradients that ``vmap`` has joined."""
    return torch._C._functorch.peek_interpreter_stack() is not None or any(map(_is_legacy, gradients))


def run_for_each(backward: Backward, gradients: list[Any]) -> Sequence[Any]:
    """Run a backward, once for each element of gradients that ``vmap`` has joined."""
    return _one_by_one(backward, gradients) if are_batched(gradients) else backward(gradients)


def _is_legacy(gradient: Any) -> bool:
    """Return True for a gradient of ``is_grads_batched=True`` or of a vectorized Jacobian."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)  # type: ignore[attr-defined]


def _one_by_one(backward: Backward, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Run a backward for each element of gradients that ``vmap`` has joined, and return the joined results."""
    functorch: Any = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None:
        interpreter = retrieve_current_functorch_interpreter()
        level, outside, join = interpreter.level(), interpreter.lower(), functorch._add_batch_dim
        pairs = [functorch._unwrap_batched(gradient, level) for gradient in gradients]
    else:
        level, outside, join = torch._C._vmapmode_increment_nesting() - 1, nullcontext(), torch._add_batch_dim
        torch._C._vmapmode_decrement_nesting()  # torch tells the level in no other way
        pairs = [(torch._remove_batch_dim(g, level, 1, 0), 0) if _is_legacy(g) else (g, None) for g in gradients]
    sizes = [value.shape[dim] for value, dim in pairs if dim is not None]
    with outside:
        runs = [
            backward([value if dim is None else value.select(dim, index) for value, dim in pairs])
            for index in range(max(sizes, default=1))
        ]
        if not sizes:
            return tuple(runs[0])
        joined = [None if same[0] is None else torch.stack(same) for same in zip(*runs, strict=True)]
    return tuple(None if each is None else join(each, 0, level) for each in joined)


def names_missing_gradients() -> bool:
    """Return True if an ``autograd.Function`` in the graph that is compiled now tells missing gradients from zeros."""
    codes = getattr(torch._guards.TracingContext, "get_traced_code", lambda: None)()
    return any("set_materialize_grads" in code.co_names for code in codes or ())
