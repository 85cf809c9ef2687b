"""Find the GELUs that transformers writes as sums and products, and write each as PyTorch's one operator."""

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


def replace_gelus(module: GraphModule) -> int:
    """Replace the GELUs in a graph of Dynamo, and return their number."""
    targets = {node.target for node in module.graph.nodes}
    if torch.tanh not in targets:
        return 0
    count = sum(
        len(replace_pattern(module, symbolic_trace(pattern), symbolic_trace(replacement)))
        for pattern, replacement in _PATTERNS
    )
    for node in module.graph.find_nodes(op="call_function", target=torch.nn.functional.gelu):
        node.meta = node.meta or dict(node.args[0].meta)
    return count
