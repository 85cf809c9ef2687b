"""Embeddings with ``max_norm``, whose forward scales rows of their weight in place, as parts in PyTorch.

The node of such a part has its weights from the graph, as views that autograd lets nobody change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Scaled = Sequence[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters, each with the copy that a run scales in its place."""


def with_copies_of_scaled(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], Scaled]:
    """Return the weights for a run of `module`, those that it scales as copies, and these with their parameters."""
    given, scaled = dict(weights), []
    for path, child in module.named_modules():
        name = f"{path}.weight" if path else "weight"
        if getattr(child, "max_norm", None) is not None and name in given:
            given[name] = given[name].clone()
            scaled.append((child.weight, given[name]))
    return given, scaled


def take_over_scaled(scaled: Scaled) -> None:
    """Give parameters the values of their scaled copies; one that ZeRO-3 has partitioned loses them, as in PyTorch."""
    with torch.no_grad():
        for parameter, copy in scaled:
            if parameter.shape == copy.shape and not copy.is_meta:
                parameter.copy_(copy)
