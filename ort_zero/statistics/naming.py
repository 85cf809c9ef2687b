"""Name tensors, modules and steps in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence


def tensor_name(kind: str, slot: str) -> str:
    """Return the name of a record's tensor: ``"output[0]"``, ``"input.hidden_states"``, ``"weight"``."""
    return slot if kind in ("parameter", "inspect") else f"{kind}{slot}"


def module_name(module: str, occurrence: int = 1) -> str:
    """Return a module's name for a table: ``"(root)"`` for the root; ``"#2"`` is appended for its second call."""
    name = module or "(root)"
    return f"{name}#{occurrence}" if occurrence > 1 else name


def span(steps: Sequence[int]) -> str:
    """Return ascending step numbers as text: ``"steps 0 to 4"``."""
    return f"step{'s' * (len(steps) != 1)} {number_list(steps)}" if steps else "no steps"


def number_list(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``"0 to 4"``, or the first eight numbers if there are gaps."""
    if not numbers:
        return "none"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
