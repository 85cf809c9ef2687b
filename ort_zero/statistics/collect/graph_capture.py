"""Have Dynamo capture operators in place of the Python code of hooks, in modules that are marked.

The operators are those of :mod:`.graph_operators`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

PLACE = "_ort_zero_place"
"""Attribute of modules within a compiled unit: the path from the unit, empty for the unit. An attribute, since layers
with equal attributes share Dynamo's graph."""
_marked = [False]
"""Whether units are marked."""


def mark_places(unit: Module) -> None:
    """Mark the modules of a compiled unit: Dynamo captures their hooks when it traces the unit the next time."""
    for path, module in unit.named_modules():
        setattr(module, PLACE, path)
    _marked[0] = True


def is_captured(module: Any) -> bool:
    """Return True within Dynamo's trace of a marked unit, for the modules in the unit."""
    return torch.compiler.is_dynamo_compiling() and bool(getattr(module, PLACE, None))


def capture_inspected(name: str, tensor: torch.Tensor) -> bool:
    """Add a tensor of ``inspect_activation`` to the graph; return False if no unit is marked. Dynamo traces this."""
    if not _marked[0]:
        return False
    torch.ops.ort_zero.observe.default(tensor, "", "inspect", name, False, False)
    return True


def capture(module: Module, kind: str, slots: list[tuple[str, torch.Tensor]]) -> None:
    """Add the tensors of a module call to the graph that Dynamo captures; to be traced by Dynamo."""
    place = getattr(module, PLACE)
    last = len(slots) - 1
    for index, (name, tensor) in enumerate(slots):
        begins, ends = kind == "input" and index == 0, kind == "output" and index == last
        torch.ops.ort_zero.observe.default(tensor, place, kind, name, begins, ends)
