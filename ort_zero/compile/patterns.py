"""Replace compositions in Dynamo's graphs by the operator that both runtimes have as one kernel."""

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
