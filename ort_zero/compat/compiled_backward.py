"""Give the backwards of AOTAutograd's graphs what PyTorch's own have: missing gradients, and gradients in batches.

AOTAutograd makes one autograd Function for each graph, whose class is reached from the results of a run. A Function
gets zeros for gradients that are missing, unless its forward says otherwise. A compiled backward refuses ``vmap``
(torch 2.6 to 2.15: ``_aot_autograd/runtime_wrappers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_PREPARED = "_ort_zero_prepared"
_NAME = "CompiledFunction"


def graph_node(result: Any) -> Any:
    """Return the autograd node of the graph that made a result, or a view of which the result is; None without one."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    for candidate in (node, *(edge for edge, _ in getattr(node, "next_functions", ())[:1])):
        if candidate is not None and candidate.name().startswith(_NAME) and hasattr(candidate, "_forward_cls"):
            return candidate
    return None


def prepare_backward(results: Iterable[Any]) -> bool:
    """Have the backward of the graph that made `results` take None for missing gradients, and gradients in batches.

    The graph's backward function must know what to do with None. Returns True if a graph with a backward made a result.
    """
    for result in results:
        node = graph_node(result)
        if node is not None:
            node.set_materialize_grads(False)
            _prepare(node._forward_cls)
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

    def in_batches(ctx: Any, *gradients: Any) -> Any:
        # from torch 2.12 on, the gradients come in a list that the backward empties
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        values = list(gradients[0]) if boxed else list(gradients)
        batched = _Batches.of(values)
        if batched is None:
            return backward(ctx, *gradients)
        keep, ctx.maybe_clear_saved_tensors = ctx.maybe_clear_saved_tensors, lambda: None

        def run(one: list[Any]) -> Sequence[Any]:
            return backward(ctx, one) if boxed else backward(ctx, *one)

        try:
            return batched.each(run)
        finally:
            ctx.maybe_clear_saved_tensors = keep

    function.forward, function.backward = staticmethod(without_zeros), staticmethod(in_batches)
    setattr(function, _PREPARED, True)


class _Batches:
    """Gradients that ``vmap`` has joined, as for ``is_grads_batched=True`` and vectorized Jacobians.

    Args:
        values: the gradients, without the dimension of ``vmap`` where `dims` is None.
        dims: the dimension of ``vmap`` in each gradient, or None.
        wrap: turns a stacked result, with the dimension of ``vmap`` first, into one of ``vmap``.
        outside: a context outside of this ``vmap``.
    """

    def __init__(
        self,
        values: Sequence[Any],
        dims: Sequence[int | None],
        wrap: Callable[[torch.Tensor], torch.Tensor],
        outside: Callable[[], AbstractContextManager[Any]],
    ):
        self._values, self._dims, self._wrap, self._outside = values, dims, wrap, outside

    @staticmethod
    def of(gradients: Sequence[Any]) -> _Batches | None:
        """Return the batches of gradients; None where no ``vmap`` is active, or none has joined these gradients."""
        functorch: Any = torch._C._functorch
        tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        if functorch.peek_interpreter_stack() is not None:
            interpreter = retrieve_current_functorch_interpreter()
            level = interpreter.level()
            pairs = [
                functorch._unwrap_batched(g, level) if isinstance(g, torch.Tensor) else (g, None) for g in gradients
            ]
            values, dims = map(list, zip(*pairs))
            return _Batches(
                values, dims, lambda stacked: functorch._add_batch_dim(stacked, 0, level), interpreter.lower
            )
        if not any(map(functorch.is_legacy_batchedtensor, tensors)):
            return None
        level = torch._C._vmapmode_increment_nesting() - 1  # torch tells the level in no other way
        torch._C._vmapmode_decrement_nesting()
        dims = [0 if g is not None and functorch.is_legacy_batchedtensor(g) else None for g in gradients]
        values = [
            g if dim is None else torch._remove_batch_dim(g, level, 1, 0)
            for g, dim in zip(gradients, dims, strict=True)
        ]
        return _Batches(values, dims, lambda stacked: torch._add_batch_dim(stacked, 0, level), nullcontext)

    def each(self, backward: Callable[[list[Any]], Sequence[Any]]) -> tuple[Any, ...]:
        """Return the joined results of a backward that runs once for each element of the batch."""
        sizes = {value.shape[dim] for value, dim in zip(self._values, self._dims, strict=True) if dim is not None}
        with self._outside():
            runs = []
            for index in range(max(sizes, default=1)):
                pairs = zip(self._values, self._dims, strict=True)
                runs.append(backward([value if dim is None else value.select(dim, index) for value, dim in pairs]))
            joined = [torch.stack(same) if same[0] is not None else None for same in zip(*runs, strict=True)]
        if not sizes:
            return tuple(runs[0])
        return tuple(None if each is None else self._wrap(each) for each in joined)


def names_missing_gradients() -> bool:
    """Return True if an ``autograd.Function`` in the graph that is compiled now tells missing gradients from zeros.

    Dynamo has both as zeros, whatever ``ctx.set_materialize_grads(False)`` says.
    """
    codes = getattr(torch._guards.TracingContext, "get_traced_code", lambda: None)()
    return any("set_materialize_grads" in code.co_names for code in codes or ())
