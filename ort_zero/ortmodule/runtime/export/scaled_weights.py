"""Modules whose forward changes their own weights in place, as parts in PyTorch.

Embeddings with ``max_norm`` scale rows of their weight. The node of such a part has its weights from the graph, as
views that autograd lets nobody change; and in an export one element may stand for a whole weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

Scaled = Sequence[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters, each with the copy that a run scales in its place."""
_changed: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Names of the parameters that modules were seen to change in place where one element stood for each."""


def note_changed(owner: torch.nn.Module, name: str) -> None:
    """Let the runs of `owner` in an export have memory for the parameter `name`, which it changes in place."""
    _changed.setdefault(owner, set()).add(name)


def with_copies_of_scaled(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], Scaled]:
    """Return the weights for a run of `module`, those that it scales as copies, and these with their parameters."""
    given, scaled = dict(weights), []
    for path, child in module.named_modules():
        for name in (f"{path}.{own}" if path else own for own in _changed.get(child, ())):
            if name in given and 0 in given[name].stride():
                given[name] = given[name].contiguous()
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
