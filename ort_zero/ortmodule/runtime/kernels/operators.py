"""Operators of our own for ATen nodes, made of PyTorch's, which choose their vector code when the program runs.

ORT's executor of ATen nodes cannot pass strings, and PyTorch has no cross entropy that keeps neither the
log-probabilities nor their gradient; for these there is an operator here. All work on the CPU, and those that compute
something on float32.
"""

from __future__ import annotations

import functools

import torch

from ort_zero.ortmodule.compat import torch_products as products
from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST, SUM_TO_SIZES
from ort_zero.ortmodule.compat.ort_kernels import UNFOLD
from ort_zero.ortmodule.compat.ortmodule import register_aten_gradient
from ort_zero.ortmodule.compat.torch_operators import new_library

NAMESPACE = "ort_zero_kernels"
_BLOCK = 1 << 17
"""Number of logits of which one thread computes the softmax before it goes on: 512 KiB stay in a core's cache."""

_FEW_POSITIONS = 64
"""Positions, of all pictures together, up to which a product computes the gradient of a convolution's weight faster:
it takes 0.16 to 0.7 of the time at 32 and 49, 1.0 to 2.5 at 98 and more."""

_SCHEMAS = (
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "product(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    "bias_gelu(Tensor x, Tensor bias) -> Tensor",
    "gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor",
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> Tensor",
    "bias_gelu_tanh_backward(Tensor grad, Tensor x, Tensor bias) -> Tensor",
    "cross_entropy(Tensor logits, Tensor labels, int ignored, bool mean) -> (Tensor, Tensor)",
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels, Tensor scale, Tensor? other, int ignored)"
    " -> Tensor",
    "checked_labels(Tensor labels, Tensor logits, int ignored) -> Tensor",
    "layer_norm(Tensor x, Tensor weight, Tensor bias, Tensor epsilon) -> (Tensor, Tensor, Tensor)",
    "rms_norm(Tensor x, Tensor weight, Tensor epsilon) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    "relu_backward(Tensor grad, Tensor y) -> Tensor",
    "convolution_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation,"
    " int groups, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    "batch_norm(Tensor x, Tensor weight, Tensor bias, Tensor(a!) mean, Tensor(b!) variance, Tensor settings)"
    " -> (Tensor, Tensor, Tensor)",
    "broadcast(Tensor x, Tensor own, Tensor other, int kept) -> Tensor",
    "sum_to_sizes(Tensor grad, Tensor own) -> Tensor",
    "batch_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse, Tensor settings)"
    " -> (Tensor, Tensor, Tensor)",
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.t()``, with `bias` added to each row.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs], or None.
    """
    return products.product(x, weight.t(), bias)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``a @ b`` with `bias` added to each row, see :func:`linear`; `b` is [inputs, outputs]."""
    return products.product(a, b, bias)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the GELU of `x` + `bias`."""
    return torch.ops.aten.gelu_(x + bias)


def gelu_tanh_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of GELU in its tanh form at `x`."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def bias_gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the gradient of GELU at `x` + `bias`."""
    y = x + bias
    return torch.ops.aten.gelu_backward.grad_input(grad, y, grad_input=y)


def bias_gelu_tanh_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the gradient of GELU in its tanh form at `x` + `bias`."""
    y = x + bias
    return torch.ops.aten.gelu_backward.grad_input(grad, y, approximate="tanh", grad_input=y)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the factor of a row in its gradient; nothing of the size of `logits` is kept.

    Args:
        logits: [rows, classes].
        labels: [rows], integers.
        ignored: the label of a row that has none.
        mean: divide by the number of labels; else the loss is their sum.

    Raises:
        RuntimeError: a label is no class.
    """
    rows, classes = logits.shape
    labels = labels.long()
    counts = labels != ignored
    picked = torch.where(counts, labels, 0).unsqueeze(1)
    chosen = logits.new_empty(rows, 1)
    size = _rows_at_once(classes)
    scratch = logits.new_empty(min(size, rows), classes)
    for at in range(0, rows, size):
        part = logits[at : at + size]
        probabilities = torch.log_softmax(part, 1, out=scratch[: part.shape[0]])
        torch.gather(probabilities, 1, picked[at : at + size], out=chosen[at : at + size])
    loss = torch.where(counts, chosen.squeeze(1), 0.0).sum(dtype=torch.float64).neg_()
    scale = counts.sum().double().reciprocal_() if mean else torch.ones((), dtype=torch.float64)
    return (loss * scale).float(), scale.float()


def cross_entropy_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    other: torch.Tensor | None,
    ignored: int,
) -> torch.Tensor:
    """Return the gradient of the logits.

    Args:
        grad: gradient of the loss, one element.
        logits: [rows, classes].
        labels: [rows], integers.
        scale: factor of a row, see :func:`cross_entropy`.
        other: gradient of the logits from elsewhere, to be added; one element stands for none.
        ignored: the label of a row that has none.
    """
    rows, classes = logits.shape
    labels = labels.long()
    counts = labels != ignored
    # a mean over no label at all: its factor is infinite, and no row has a gradient
    factors = torch.where(counts, grad.reshape(()) * scale.reshape(()), 0.0).unsqueeze(1)
    picked = torch.where(counts, labels, 0).unsqueeze(1)
    result = torch.empty_like(logits)
    added = None if other is None or other.numel() != logits.numel() else other.reshape(logits.shape)
    size = _rows_at_once(classes)
    for at in range(0, rows, size):
        part, factor = logits[at : at + size], factors[at : at + size]
        out = torch.softmax(part, 1, out=result[at : at + size])
        out.mul_(factor).scatter_add_(1, picked[at : at + size], factor.neg())
        if added is not None:
            out.add_(added[at : at + size])
    return result


def broadcast(x: torch.Tensor, own: torch.Tensor, other: torch.Tensor, kept: int) -> torch.Tensor:
    """Return `x` broadcast with a tensor of the sizes `other`, in memory of its own.

    Args:
        x: of any shape and dtype.
        own: its sizes; the gradient is summed to them.
        other: sizes that it is broadcast with.
        kept: how many of the last sizes stay as they are.
    """
    first = torch.broadcast_shapes(x.shape[: x.dim() - kept], other.tolist()[: len(other) - kept])
    return x.expand(first + x.shape[x.dim() - kept :]).clone(memory_format=torch.contiguous_format)


def sum_to_sizes(grad: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the gradient of what :func:`broadcast` has broadcast from the sizes `own`, in memory of its own."""
    result = grad.sum_to_size(own.tolist())
    return result.clone() if result.data_ptr() == grad.data_ptr() else result


def checked_labels(labels: torch.Tensor, logits: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return `labels`, which ORT's kernels take for places in memory without a look at them.

    Args:
        labels: [rows, ...], integers.
        logits: [rows, classes, ...].
        ignored: the label of a row that has none.

    Raises:
        IndexError: a label is no class.
    """
    wrong = (labels < 0) | (labels >= logits.shape[1])
    wrong &= labels != ignored
    if wrong.any():
        raise IndexError(f"Target {labels[wrong][0].item()} is out of bounds.")
    return labels.clone()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `x` normalized over its last dimension, the mean of each row and its inverse deviation.

    Args:
        x: [..., width].
        weight: [width].
        bias: [width].
        epsilon: added to the variance, one element.
    """
    return torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, epsilon.item())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` over the root of the mean square of its last dimension, and the inverse of that root, of each row.

    Args:
        x: [..., width].
        weight: [width].
        epsilon: added to the mean square, one element.
    """
    width = len(weight)
    flat, result = x.reshape(-1, width), torch.empty_like(x)
    out, inverse = result.reshape(-1, width), x.new_empty(*x.shape[:-1], 1)
    roots, size = inverse.reshape(-1, 1), _rows_at_once(width)
    for at in range(0, len(flat), size):
        rows, scaled, root = (values[at : at + size] for values in (flat, out, roots))
        torch.mul(rows, rows, out=scaled)
        torch.mean(scaled, 1, keepdim=True, out=root).add_(epsilon).rsqrt_()
        torch.mul(rows, root, out=scaled).mul_(weight)
    return result, inverse


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `x` and of the weight, see :func:`rms_norm`.

    Args:
        grad: gradient of the result.
        x: [..., width].
        weight: [width].
        inverse: [..., 1].
    """
    width = len(weight)
    result, of_weight = torch.empty_like(x), torch.zeros_like(weight)
    given, flat, out, roots = (values.reshape(-1, values.shape[-1]) for values in (grad, x, result, inverse))
    size = _rows_at_once(width)
    for at in range(0, len(flat), size):
        dy, rows, root, dx = (values[at : at + size] for values in (given, flat, roots, out))
        together = torch.mul(dy, rows, out=dx)
        of_weight.addmv_(together.t(), root[:, 0])
        projection = torch.mv(together, weight).unsqueeze_(1).mul_(root * root * root / -width)
        torch.mul(dy, weight, out=dx).mul_(root).addcmul_(rows, projection)
    return result, of_weight


def relu_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a ReLU whose result is `y`."""
    return torch.ops.aten.threshold_backward.default(grad, y, 0)


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of input, weight and bias of a convolution; an empty one in the place of each unwanted.

    Over few positions the gradient of the weight is a product of matrices: PyTorch's library sums over the positions of
    each picture apart, which takes most of the time where these are less than a register holds.
    """
    none = [0] * len(stride)
    of_weight: torch.Tensor | None = None
    if wanted[1] and groups == 1 and grad.numel() <= _FEW_POSITIONS * grad.shape[1]:
        of_weight = _weight_gradient_of_few(grad, x, weight, stride, padding, dilation)
    wanted = [wanted[0], wanted[1] and of_weight is None, wanted[2]]
    found: tuple[torch.Tensor | None, ...] = (None, None, None)
    if any(wanted):
        found = torch.ops.aten.convolution_backward.default(
            grad, x, weight, [weight.shape[0]], stride, padding, dilation, False, none, groups, wanted
        )
    first, second, third = (
        grad.new_empty(0) if gradient is None else gradient.contiguous()
        for gradient in (found[0], found[1] if of_weight is None else of_weight, found[2])
    )
    return first, second, third


def _weight_gradient_of_few(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """Return the gradient of a convolution's weight as one product over all positions of all pictures."""
    columns = torch.ops.aten.im2col.default(x, weight.shape[2:], dilation, padding, stride)
    rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
    return torch.mm(grad.flatten(2).transpose(0, 1).reshape(len(weight), -1), rows).view_as(weight)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    settings: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a batch is normalized to, its mean and its inverse deviation; updates the running statistics.

    Args:
        x: [batch, channels, ...].
        weight: [channels].
        bias: [channels].
        mean: the running one, changed in place.
        variance: the running one, changed in place.
        settings: momentum and epsilon, float64; what follows tells one node from another.
    """
    momentum, epsilon = settings[:2].tolist()
    return torch.ops.aten.native_batch_norm.default(x, weight, bias, mean, variance, True, momentum, epsilon)


def batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    settings: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `x`, of the weight and of the bias, see :func:`batch_norm`."""
    return torch.ops.aten.native_batch_norm_backward.default(
        grad, x, weight, None, None, mean, inverse, True, settings[1].item(), [True, True, True]
    )


def _rows_at_once(classes: int) -> int:
    return max(1, _BLOCK * torch.get_num_threads() // max(classes, 1))


@functools.cache
def _library() -> torch.library.Library:
    library = new_library(NAMESPACE, _SCHEMAS, globals())
    register_aten_gradient(BROADCAST, [(SUM_TO_SIZES, ["GO(0)", "I(1)"], ["GI(0)"])])
    backward = ["GO(0)", "sizes", "I(1)", "I(2)", "I(3)"]
    register_aten_gradient(UNFOLD, [("Shape", ["I(0)"], ["sizes"]), ("unfold_backward", backward, ["GI(0)"])])
    return library


def register() -> None:
    """Let PyTorch, ORT's executor of ATen nodes and ORT's gradient builder know the operators; once in a process."""
    _library()
