"""What tensors, modules and spans of steps are called in front of people."""

from __future__ import annotations

from collections.abc import Sequence


def tensor_name(kind: str, slot: str) -> str:
    """Return one name for a record's kind and slot: ``"output[0]"``, ``"input.hidden_states"``, ``"weight"``."""
    return slot if kind in ("parameter", "inspect") else f"{kind}{slot}"


def module_name(module: str, occurrence: int = 1) -> str:
    """Return a module's name for a table: ``"(root)"`` for the root, with ``"#2"`` in its second call, and so on."""
    name = module or "(root)"
    return call_name(name, occurrence) if occurrence > 1 else name


def call_name(module: str, occurrence: int) -> str:
    """Return the name of one call of a module: ``"h.0#1"``."""
    return f"{module}#{occurrence}"


def span(steps: Sequence[int]) -> str:
    """Return some steps, which ascend: ``"steps 0 to 4"``, or how many of them there are if some are left out."""
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def number_list(numbers: Sequence[int]) -> str:
    """Return some numbers, which ascend: ``"0 to 4"``, or the first eight of them if some are left out."""
    if not numbers:
        return "none"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
