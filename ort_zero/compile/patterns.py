"""Replace calls of Dynamo's graphs by operators that both runtimes have, or that have eager PyTorch's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.subgraph_rewriter import replace_pattern


def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU as GPT-2 of transformers writes it (``NewGELUActivation``)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU as ``FastGELUActivation`` of transformers and BLOOM write it."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


_PATTERNS: tuple[tuple[Callable, Callable], ...] = ((_gelu_by_tanh, _gelu), (_fast_gelu, _gelu))


def replace_compositions(module: GraphModule) -> int:
    """Replace the known compositions in a graph of Dynamo, and return the number of replacements."""
    targets = {node.target for node in module.graph.nodes}
    if torch.tanh not in targets:
        return 0
    return sum(
        len(replace_pattern(module, symbolic_trace(pattern), symbolic_trace(replacement)))
        for pattern, replacement in _PATTERNS
    )


_AS_EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "hardshrink": torch.hardshrink,
    "prod": lambda x, dim=None, keepdim=False: x.prod() if dim is None else x.prod(int(dim), bool(keepdim)),
}
"""Functions whose gradient a trace writes in another way than eager PyTorch computes it. A product's
gradient depends on the number of zeros, the gradient of ``hardshrink`` on the place of NaN."""


@torch.library.custom_op("ort_zero::as_eager", mutates_args=())
def _as_eager(x: torch.Tensor, name: str, numbers: Sequence[float]) -> torch.Tensor:
    return _AS_EAGER[name](x, *numbers)


@_as_eager.register_fake
def _(x: torch.Tensor, name: str, numbers: Sequence[float]) -> torch.Tensor:
    return _AS_EAGER[name](x, *numbers)


# not a custom_op: those disable autograd within
torch.library.define("ort_zero::eager_gradient", "(Tensor gradient, Tensor x, str name, float[] numbers) -> Tensor")
_eager_gradient = torch.ops.ort_zero.eager_gradient.default


@torch.library.impl("ort_zero::eager_gradient", "default")
def _(gradient: torch.Tensor, x: torch.Tensor, name: str, numbers: Sequence[float]) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_AS_EAGER[name](leaf, *numbers), leaf, gradient)[0]


@torch.library.register_fake("ort_zero::eager_gradient")
def _(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_inputs(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.arguments = inputs[1:]


_as_eager.register_autograd(
    lambda context, gradient: (_eager_gradient(gradient, *context.saved_tensors, *context.arguments), None, None),
    setup_context=_keep_inputs,
)


def keep_gradients_of_eager(module: GraphModule) -> None:
    """Replace the calls of a graph of Dynamo whose gradients a trace writes in another way than eager PyTorch."""
    for node in module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        result = node.meta.get("example_value")
        is_plain = node.args and not node.kwargs.keys() - {"dim", "keepdim", "lambd"}
        if name in _AS_EAGER and is_plain and getattr(result, "requires_grad", False):
            numbers = [float(each) for each in (*node.args[1:], *(node.kwargs[key] for key in sorted(node.kwargs)))]
            node.op, node.target = "call_function", _as_eager
            node.args, node.kwargs = (node.args[0], name, numbers), {}
