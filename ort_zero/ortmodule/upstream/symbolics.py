"""Symbolics of ATen operators that upstream lacks, or that are wrong in some cases; one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _embedding(g: Any, weight: Any, indices: Any, padding_idx: Any, scale_grad_by_freq: Any, sparse: Any) -> Any:
    """Export ``aten::embedding`` as an ATen node, whatever the weight's size at the export.

    A weight that ZeRO-3 has partitioned has the size (0): then the last dimension of the result is unknown, and never
    taken from the weight. The gradient is dense also where a sparse one is asked for, since values of a graph are.
    """
    from torch.onnx import symbolic_helper

    sparse = g.op("Constant", value_t=torch.tensor(False))
    result = g.op(
        "org.pytorch.aten::ATen", weight, indices, padding_idx, scale_grad_by_freq, sparse, operator_s="embedding"
    )
    sizes, index_sizes = (symbolic_helper._get_tensor_sizes(each) for each in (weight, indices))
    kind = weight.type()
    if hasattr(kind, "with_sizes"):
        width = sizes[1] if sizes is not None and len(sizes) == 2 else None
        result.setType(kind.with_sizes(None if index_sizes is None else [*index_sizes, width]))
    return result


def _gelu(g: Any, x: Any, approximate: Any) -> Any:
    """Export a GELU by tanh as the one node that ONNX Runtime's memory optimizer knows, any other one as torch does."""
    from torch.onnx import symbolic_helper, symbolic_opset9

    if symbolic_helper._parse_arg(approximate, "s") != "tanh":
        return symbolic_opset9.gelu(g, x, approximate)
    result = g.op("com.microsoft::FastGelu", x)
    result.setType(x.type())
    return result


SYMBOLICS: dict[str, Callable[..., Any]] = {"::embedding": _embedding, "::gelu": _gelu}
"""``"::name"`` of an ATen operator to its symbolic; wins over upstream's."""
