"""ONNX symbolics that the exporter or ORT lacks on this stack, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_zero.compat.torch_onnx import Symbolic


def embedding(g: Any, weight: Any, indices: Any, padding_idx: Any, scale_grad_by_freq: Any, sparse: Any) -> Any:
    """Export ``aten::embedding`` as an ATen node, whatever the weight's size at export.

    A weight that ZeRO-3 partitioned has size (0): then only the rank of the output is known, not its last dimension.
    """
    out = g.op(
        "org.pytorch.aten::ATen", weight, indices, padding_idx, scale_grad_by_freq, sparse, operator_s="embedding"
    )
    sizes = Symbolic.sizes(weight)
    width = sizes[1] if sizes is not None and len(sizes) == 2 else None
    index_sizes = Symbolic.sizes(indices)
    kind = weight.type()
    if index_sizes is not None and hasattr(kind, "with_sizes"):
        out.setType(kind.with_sizes([*index_sizes, width]))
    elif hasattr(kind, "with_sizes"):
        # nothing about the shape is known: keep the element type alone, never the weight's own shape
        out.setType(kind.with_sizes(None))
    return out


def diff(g: Any, self: Any, n: Any, dim: Any, prepend: Any, append: Any) -> Any:
    """Export ``aten::diff`` of any order as slices and subtractions."""
    order = Symbolic.integer(n, "n")
    axis = Symbolic.integer(dim, "dim")
    parts = [part for part in (prepend, self, append) if not Symbolic.is_none(part)]
    value = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else self
    is_bool = self.type().scalarType() == "Bool"
    for _ in range(order):
        later = Symbolic.slice(g, value, axis, 1, 2**63 - 1)
        earlier = Symbolic.slice(g, value, axis, 0, -1)
        value = g.op("Xor", later, earlier) if is_bool else g.op("Sub", later, earlier)
    return value


def cumsum(g: Any, self: Any, dim: Any, dtype: Any) -> Any:
    """Export ``aten::cumsum``; booleans and small integers are summed as int64, as torch does.

    ONNX's CumSum takes no bool. Decoders sum "is this position not the successor of the one before" without a mask.
    """
    kind = self.type().scalarType()
    if not Symbolic.is_none(dtype):
        target = Symbolic.onnx_type(Symbolic.integer(dtype, "dtype"))
    elif kind in ("Bool", "Byte", "Char", "Short", "Int"):
        target = 7  # TensorProto.INT64
    else:
        return g.op("CumSum", self, dim)
    return g.op("CumSum", g.op("Cast", self, to_i=target), dim)


def scaled_dot_product_attention(g: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """Export attention whose query heads share key and value heads (``enable_gqa``); the rest is torch's own.

    Decoders with grouped heads ask for it whenever they get no attention mask.
    """
    from torch.onnx import symbolic_opset14

    *rest, shared = rest  # mask, dropout, causal, scale; enable_gqa
    if Symbolic.integer(shared, "enable_gqa"):
        heads = Symbolic.sizes(query)[-3]
        key, value = (_repeat_heads(g, part, heads) for part in (key, value))
    return symbolic_opset14.scaled_dot_product_attention(g, query, key, value, *rest)


def _repeat_heads(g: Any, value: Any, heads: int) -> Any:
    """Return `value` with each head repeated, one after the other, until there are `heads`."""
    import torch

    sizes = list(Symbolic.sizes(value))
    order = torch.arange(sizes[-3]).repeat_interleave(heads // sizes[-3])
    out = g.op("Gather", value, g.op("Constant", value_t=order), axis_i=len(sizes) - 3)
    sizes[-3] = heads
    out.setType(value.type().with_sizes(sizes))
    return out


TABLE: dict[str, Callable] = {
    "::cumsum": cumsum,
    "::diff": diff,
    "::embedding": embedding,
    "::scaled_dot_product_attention": scaled_dot_product_attention,
}
"""``"::name"`` of an ATen operator to its symbolic; wins over ORT's own."""


def install(ort_table: dict[str, Callable]) -> Callable[[], None]:
    """Put :data:`TABLE` into ORT's table of symbolics, which every ORTModule registers; return how to undo it."""
    before = dict(ort_table)
    ort_table.update(TABLE)

    def undo() -> None:
        ort_table.clear()
        ort_table.update(before)

    return undo
