"""Replace calls of Dynamo's graphs by operators that both runtimes have, and find those that no trace can have."""

from __future__ import annotations

import math
from collections.abc import Callable

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


_TRACED_OTHERWISE = frozenset({"hardshrink", "prod"})
"""Functions whose gradient a trace writes in another way than eager PyTorch computes it. A product's gradient depends
on the number of zeros, the gradient of ``hardshrink`` on the place of NaN."""


def traced_otherwise(module: GraphModule) -> str | None:
    """Return a function of a graph of Dynamo whose gradient a trace writes in another way; None if there is none."""
    for node in module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name in _TRACED_OTHERWISE and getattr(node.meta.get("example_value"), "requires_grad", False):
            return name
    return None
