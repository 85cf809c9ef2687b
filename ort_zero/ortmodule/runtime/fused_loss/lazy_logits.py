"""Logits that are computed when somebody reads them.

A graph whose loss never holds all logits cannot return them. What it returns instead is a tensor that knows the head's
input, weight and bias of that run, and computes itself from them once, whatever reads it. For autograd it is an
ordinary result: gradients that reach it go to the head's input and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ort_zero.ortmodule.compat.lazy_tensor import LazyTensor
from ort_zero.ortmodule.compat.torch_products import product
from ort_zero.ortmodule.runtime.fused_loss.rewrite import ReturnedLogits


class LogitReads:
    """Counts the calls in a row whose logits were read.

    Attributes:
        in_a_row: number of calls, up to the last one.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._read = False

    def note(self) -> None:
        """Note that the logits of the last call, or of an earlier one, were read."""
        self._read = True

    def begin_call(self) -> None:
        """Note that another call begins."""
        self.in_a_row = self.in_a_row + 1 if self._read else 0
        self._read = False


class _Head(torch.autograd.Function):
    """The linear layer that computes logits when they are read."""

    @staticmethod
    def forward(ctx: Any, on_read: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.biased = bias is not None
        parts = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        return LazyTensor(lambda: _logits(*parts), hidden, (*hidden.shape[:-1], len(weight)), on_read)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        flat = gradients[0].reshape(-1, len(weight))
        if isinstance(flat, LazyTensor):
            flat = flat.values_now()
        states = hidden.reshape(-1, hidden.shape[-1])
        return None, (flat @ weight).reshape(hidden.shape), flat.t() @ states, flat.sum(0) if ctx.biased else None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = product(hidden.reshape(-1, hidden.shape[-1]), weight.t(), bias)
    return result.reshape(*hidden.shape[:-1], len(weight))


def put_logits(
    results: Sequence[torch.Tensor], returned: ReturnedLogits, on_read: Callable[[], None]
) -> list[torch.Tensor]:
    """Return the results of a graph with the logits in the place of what they are computed from.

    Args:
        results: of a run of the graph.
        returned: where they are.
        on_read: called when somebody reads the logits.
    """
    behind = returned.first + returned.count
    layer = results[returned.first : behind]
    kept = [*results[: returned.first], *results[behind:]]
    weight, bias = layer[0], layer[1] if len(layer) > 1 else None
    kept[returned.index] = _Head.apply(on_read, kept[returned.index], weight, bias)
    return kept
