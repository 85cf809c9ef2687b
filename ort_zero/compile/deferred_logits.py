"""Leave the logits of a head uncomputed until it is known who reads them: the loss, or the user's code.

The head's forward returns a tensor without memory. Autograd sees an ordinary one, and records what the model does with
it. Below autograd, operators that move rows of logits move rows of hidden states instead; a cross entropy becomes
:func:`ort_zero.compile.head_loss.loss_and_gradients`, and its gradient goes back to the head as what it is: the
gradients of hidden states and weight. Any other operator computes the logits first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from ort_zero.compat.deferred_tensor import COPIES, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, VIEWS, DeferredTensor, Values
from ort_zero.compile.head_loss import DTYPES, LEAST_CLASSES, LossGradients, ProductsOf, loss_and_gradients

aten = torch.ops.aten
_ENOUGH_READS = 3
"""Calls in a row whose logits were read, after which a head computes its logits at once."""
_REDUCTIONS = {1: "mean", 2: "sum"}
"""Reductions of losses by ATen's numbers."""


def is_head(module: nn.Module) -> bool:
    """Return True for a linear layer with 4,096 results or more, and twice as many as inputs, as heads have."""
    return type(module) is nn.Linear and module.out_features >= max(LEAST_CLASSES, 2 * module.in_features)


class DeferringHead:
    """The forward of a head: leaves the logits to the loss where that is possible."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        products_of: ProductsOf,
        note_loss: Callable[[], None],
        devices: Sequence[str],
    ):
        self._compiled, self._devices = compiled, devices
        self.products_of, self.note_loss = products_of, note_loss
        self._reads_in_a_row = 0
        self._was_read = False

    def __call__(self, head: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        """Return logits for hidden states, uncomputed if gradients are to follow."""
        if kwargs or len(args) != 1 or not self._can_defer(head, args[0]):
            return self._compiled(head, *args, **kwargs)
        self._reads_in_a_row = self._reads_in_a_row + 1 if self._was_read else 0
        self._was_read = False
        return _Linear.apply(self, args[0], head.weight, head.bias)

    def _can_defer(self, head: nn.Linear, hidden: torch.Tensor) -> bool:
        return (
            torch.is_grad_enabled()
            and type(head) is nn.Linear  # fully_shard changes the class, and frees the weight after the forward
            and self._reads_in_a_row + self._was_read < _ENOUGH_READS
            and type(hidden) is torch.Tensor
            and type(head.weight) is nn.Parameter  # no DTensor
            and hidden.dim() > 1
            and (hidden.requires_grad or head.weight.requires_grad)
            and hidden.dtype == head.weight.dtype
            and hidden.dtype in DTYPES
            and hidden.device == head.weight.device
            and hidden.device.type in self._devices
            and not torch.is_autocast_enabled(hidden.device.type)
        )

    def note_read(self) -> None:
        """Note that the logits of the last call were computed, since an operator or the user's code read them."""
        self._was_read = True


class _Call:
    """One call of a head: what its logits are computed from, and the tensors that stand for them."""

    def __init__(self, head: DeferringHead, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        self.head, self.hidden, self.weight, self.bias = head, hidden, weight, bias
        self.products = head.products_of(weight, bias)  # not below autograd: the first call traces them
        self.trains = False
        """Whether the head's parameters need gradients."""
        self.is_read = False
        self._tensors: list[WeakIdRef] = []

    def add(self, tensor: DeferredLogits) -> None:
        """Note a tensor that stands for logits or log-probabilities of the call."""
        self._tensors.append(WeakIdRef(tensor))

    def tensors(self) -> list[DeferredLogits]:
        """Return the tensors that still live."""
        return [tensor for reference in self._tensors if (tensor := reference()) is not None]

    def logits(self) -> torch.Tensor:
        """Return the logits."""
        self.is_read = True
        self.head.note_read()
        if self.weight.untyped_storage().nbytes() < self.weight.numel() * self.weight.element_size():
            raise RuntimeError(
                "logits are read after the memory of the head's weight was freed; read them before, or set "
                '"compile": {"fuse_loss": "off"} in the ort_zero section'
            )
        return nn.functional.linear(self.hidden, self.weight, self.bias)

    def keep_for_later(self) -> None:
        """Copy the parameters if the logits may still be read: an optimizer step changes the parameters."""
        if not self.is_read and self.tensors():
            self.weight, self.bias = self.weight.clone(), None if self.bias is None else self.bias.clone()


@dataclass(frozen=True, slots=True)
class _Rows:
    """What stands for rows of logits below autograd."""

    states: torch.Tensor
    """Hidden states, [..., width]; of a gradient, the gradient of the hidden states."""
    kind: str
    """``logits``, ``log-probabilities`` or ``gradient``."""
    of_parameters: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Of a gradient: the gradients of weight and bias."""


class DeferredLogits(DeferredTensor):
    """Logits, their log-probabilities or their gradient."""

    call: _Call
    rows: _Rows
    loss_gradients: LossGradients | None
    """Of log-probabilities whose loss was computed: the gradients of hidden states, weight and bias."""

    def __init__(self, sizes: Any, dtype: torch.dtype, device: torch.device, values: Values, call: _Call, rows: _Rows):
        self.call, self.rows, self.loss_gradients = call, rows, None
        if rows.kind != "gradient":
            call.add(self)

    @classmethod
    def without_values(cls, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what stands for the result of an operator, or the loss; None if the logits are needed."""
        short = _SHORT.get(function)
        return None if short is None else short(function, *args, **kwargs)

    def before_change(self) -> None:
        """Compute all views and copies of the logits: they are made of what the logits were until now."""
        for tensor in self.call.tensors():
            tensor.content.now()

    def derived(self, like: torch.Tensor, rows: _Rows, compute: Callable[[], torch.Tensor]) -> DeferredLogits:
        """Return a tensor of the same call, with the sizes and dtype of a meta tensor."""
        return DeferredLogits(like.shape, like.dtype, self.device, Values(compute), self.call, rows)


class _Linear(torch.autograd.Function):
    """Linear layer whose forward returns deferred logits, and whose backward takes deferred or plain gradients."""

    @staticmethod
    def forward(
        ctx: Any, head: DeferringHead, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.call = call = _Call(head, hidden.detach(), weight.detach(), None if bias is None else bias.detach())
        call.trains = any(ctx.needs_input_grad[2:])
        sizes, rows = (*hidden.shape[:-1], len(weight)), _Rows(call.hidden, "logits")
        return DeferredLogits(sizes, hidden.dtype, hidden.device, Values(call.logits), call, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.call is not None:
            ctx.call.keep_for_later()
            ctx.call = None  # a loss that the user keeps would hold the weight
        (gradient,), (hidden, weight), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        if isinstance(gradient, DeferredLogits) and not gradient.content.are_computed and not torch.is_grad_enabled():
            return None, gradient.rows.states.reshape(hidden.shape), *gradient.rows.of_parameters
        flat, states = gradient.reshape(-1, len(weight)), hidden.reshape(-1, hidden.shape[-1])
        return (
            None,
            (flat @ weight).reshape(hidden.shape) if needed[1] else None,
            flat.t() @ states if needed[2] else None,
            flat.sum(0) if needed[3] else None,
        )


def _is_pending(value: Any, kind: str) -> bool:
    return isinstance(value, DeferredLogits) and value.rows.kind == kind and not value.content.are_computed


def _moved(function: Any, tensor: Any, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    """Return rows that an operator copies or moves as a whole; None if it needs the values."""
    values, dtype, device = tensor.content, kwargs.get("dtype"), kwargs.get("device")
    if values.are_computed or dtype not in (None, tensor.dtype, torch.float32, tensor.rows.states.dtype):
        return None
    if device not in (None, tensor.device):
        return None
    like = function(tensor.meta(), *args, **({} if dtype is None else {"dtype": dtype}))
    states, last = tensor.rows.states, tensor.dim() - 1
    if function in VIEWS and like.shape[-1] == tensor.shape[-1]:
        states = states.reshape(*like.shape[:-1], states.shape[-1])
    elif function in (aten.slice.Tensor, aten.slice_backward.default) and like.shape == tensor.shape:
        pass  # of ``logits[..., :-1, :]`` torch 2.8 takes a slice of all classes as well
    elif function is aten.slice.Tensor and args and args[0] % tensor.dim() != last:
        states = function(states, *args)
    elif function is aten.slice_backward.default and args[1] % tensor.dim() != last:
        states = function(states, [*args[0][:-1], states.shape[-1]], *args[1:])
    elif function not in COPIES:
        return None
    rows = _Rows(states, tensor.rows.kind, tensor.rows.of_parameters)
    return tensor.derived(like, rows, lambda: function(values.now(), *args, **kwargs))


def _log_softmax(function: Any, tensor: Any, dim: int, to_float: bool) -> DeferredLogits | None:
    if not _is_pending(tensor, "logits") or tensor.dim() != 2 or dim % 2 != 1:
        return None
    values, rows = tensor.content, _Rows(tensor.rows.states, "log-probabilities")
    # not by torch's meta kernel, which is Python and takes a millisecond
    like = tensor.meta(torch.float32 if to_float else None)
    return tensor.derived(like, rows, lambda: function(values.now(), dim, to_float))


def _loss(
    function: Any, tensor: Any, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the loss and the number of labels, and keep the gradients for the backward."""
    if not _is_pending(tensor, "log-probabilities") or tensor.call.is_read:
        return None
    if weight is not None or reduction not in _REDUCTIONS or labels.dtype is not torch.int64:
        return None
    call = tensor.call
    is_mean, states = _REDUCTIONS[reduction] == "mean", tensor.rows.states
    loss, gradients = loss_and_gradients(
        states, call.weight, call.bias, labels, ignored, is_mean, call.trains, call.products
    )
    tensor.loss_gradients = gradients
    call.head.note_loss()
    return loss.to(tensor.dtype), (labels != ignored).sum().to(tensor.dtype)


def _loss_backward(function: Any, gradient: torch.Tensor, tensor: Any, *rest: Any) -> DeferredLogits | None:
    if not isinstance(tensor, DeferredLogits) or tensor.loss_gradients is None:
        return None
    is_one = gradient.device.type == "cpu" and gradient.item() == 1.0

    def scaled(part: torch.Tensor | None) -> Any:
        return part if part is None or is_one else part * gradient.to(part.dtype)

    for_hidden, for_weight, for_bias = map(scaled, tensor.loss_gradients)
    values, rows = tensor.content, _Rows(for_hidden, "gradient", (for_weight, for_bias))
    return tensor.derived(tensor.meta(), rows, lambda: function(gradient, values.now(), *rest))


def _log_softmax_backward(
    function: Any, gradient: Any, result: Any, dim: int, dtype: torch.dtype
) -> DeferredLogits | None:
    if not _is_pending(gradient, "gradient") or not isinstance(result, DeferredLogits):
        return None
    values, of_result = gradient.content, result.content
    return gradient.derived(
        gradient.meta(dtype), gradient.rows, lambda: function(values.now(), of_result.now(), dim, dtype)
    )


_SHORT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*VIEWS, *COPIES, aten.slice.Tensor, aten.slice_backward.default), _moved),
    LOG_SOFTMAX: _log_softmax,
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
}
"""The operators that need no logits; each function returns None where the logits are needed after all."""
