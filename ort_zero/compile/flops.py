"""Count the floating-point operations of the calls of a graph, by torch's flop counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ort_zero.compat.torch_compile import tree_map
from ort_zero.runtimes.memory_order import hint

_COUNTED_AS = {
    f"_scaled_dot_product_flash_attention_for_cpu{end}": getattr(
        torch.ops.aten, f"_scaled_dot_product_flash_attention{end}"
    )
    for end in ("", "_backward")
}
"""Operators that torch's counter does not know, and the operator with the same sizes that it counts."""


def flops_of(node: Node) -> int:
    """Return the floating-point operations of a call, 0 for an operator that torch's counter does not count."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(_COUNTED_AS.get(getattr(packet, "__name__", ""), packet))
    if count is None:
        return 0

    def value(argument: Any) -> Any:
        return _sized(argument.meta.get("val")) if isinstance(argument, Node) else argument

    arguments = tree_map(value, node.args)
    return int(count(*arguments, **tree_map(value, dict(node.kwargs)), out_val=tree_map(_sized, node.meta["val"])))


def _sized(value: Any) -> Any:
    """Return a tensor without memory, of the sizes that a fake tensor had in the call that was traced."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
