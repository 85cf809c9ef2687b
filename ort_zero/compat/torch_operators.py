"""What torch knows of its operators."""

from __future__ import annotations

import torch


def is_deterministic(name: str, overload: str = "") -> bool:
    """Return whether an ATen operator computes the same whenever it runs; False for one that torch does not know.

    Args:
        name: such as ``"aten::embedding"`` or ``"embedding"``.
        overload: such as ``"Tensor"``; empty for the default one.
    """
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    operator = getattr(packet, overload or "default", None)
    if operator is None:
        return False
    return torch.Tag.nondeterministic_seeded not in operator.tags and not operator._schema.is_mutable
