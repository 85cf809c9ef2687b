"""ONNX symbolics that the exporter or ORT lacks on this stack, in one table.

The plugin puts :data:`TABLE` into ORT's table of symbolics, which every ORTModule registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ort_zero.ortmodule.compat.ort_kernels import UNFOLD
from ort_zero.ortmodule.compat.torch_onnx import Symbolic, TracedValue, Unexportable


def embedding(g: Any, weight: Any, indices: Any, padding_idx: Any, scale_grad_by_freq: Any, sparse: Any) -> Any:
    """Export ``aten::embedding`` as an ATen node, whatever the weight's size at export.

    A weight that ZeRO-3 partitioned has size (0): then only the rank of the output is known, not its last dimension.
    The gradient is dense also where a sparse one is asked for, since values of a graph are.
    """
    sparse = g.op("Constant", value_t=torch.tensor(False))
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


def constant_pad_nd(g: Any, self: Any, padding: Any, value: Any = None) -> Any:
    """Export ``aten::constant_pad_nd`` so that the sizes of a padding of computed width can be inferred.

    torch's own export puts such a padding into the order of ONNX by operators that shape inference does not follow.
    """
    sizes, pads = Symbolic.sizes(self), Symbolic.packed(padding)
    plain = Symbolic.original("aten::constant_pad_nd", g.opset)
    if sizes is None or pads is None or None not in Symbolic.items(padding, "pad"):
        return plain(g, self, padding, value)
    filled = plain(g, self, g.op("Constant", value_t=torch.zeros(2, dtype=torch.int64)), value).node()
    first = g.op("Constant", value_t=torch.tensor([0]))
    begins, ends = ([first] * len(sizes) for _ in range(2))
    for i, pad in enumerate(pads):
        of_axis = g.op("Cast", g.op("Unsqueeze", pad, first), to_i=7)  # TensorProto.INT64
        (ends if i % 2 else begins)[len(sizes) - 1 - i // 2] = of_axis
    return g.op("Pad", self, g.op("Concat", *begins, *ends, axis_i=0), *[*filled.inputs()][2:], mode_s="constant")


def pad(g: Any, self: Any, padding: Any, mode: Any, value: Any) -> Any:
    """Export ``aten::pad``, see :func:`constant_pad_nd`."""
    if Symbolic.text(mode, "mode") == "constant":
        return constant_pad_nd(g, self, padding, value)
    return Symbolic.original("aten::pad", g.opset)(g, self, padding, mode, value)


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
    """Export attention with shared heads (``enable_gqa``) and with masks that hide every key from a query.

    Decoders with grouped heads ask for the former whenever they get no attention mask; the latter are the positions of
    padding on the left. The output is 0 there, and so are the gradients. torch's own export, which does the rest,
    repairs only the output: the gradients of its softmax over nothing are NaN.
    """
    from torch.onnx import symbolic_opset14

    mask, *options = rest[:4]  # dropout, causal, scale
    shared = rest[4:]  # enable_gqa, from torch 2.5 on
    if shared and Symbolic.integer(shared[0], "enable_gqa"):
        heads = Symbolic.sizes(query)[-3]
        key, value = (_repeat_heads(g, part, heads) for part in (key, value))
    if Symbolic.is_none(mask):
        return symbolic_opset14.scaled_dot_product_attention(g, query, key, value, mask, *options)
    bias, sees_any = _finite_bias(g, query, mask)
    out = symbolic_opset14.scaled_dot_product_attention(g, query, key, value, bias, *options)
    return g.op("Mul", out, sees_any)


def _finite_bias(g: Any, query: Any, mask: Any) -> tuple[Any, Any]:
    """Return what is added to the scores for `mask`, and for each query 1, or 0 if it sees no key.

    Where a boolean mask is False or another one -inf, the lowest finite number is added: among keys that a query sees
    their weight is 0 as before, and without any the softmax remains one over numbers.
    """
    import torch

    dtype = Symbolic.dtype(query)
    lowest, zero, one = (
        g.op("Constant", value_t=torch.tensor(value, dtype=dtype)) for value in (torch.finfo(dtype).min, 0.0, 1.0)
    )
    if mask.type().scalarType() == "Bool":
        seen, added = mask, zero
    else:
        seen, added = g.op("Greater", mask, g.op("Constant", value_t=torch.tensor(-float("inf"), dtype=dtype))), mask
    bias = g.op("Where", seen, added, lowest)
    bias.setType(query.type().with_sizes(Symbolic.sizes(mask)))
    keys = g.op("Constant", value_t=torch.tensor([-1]))
    count = g.op("ReduceSum", g.op("Where", seen, one, zero), keys, keepdims_i=1)
    return bias, g.op("Where", g.op("Greater", count, zero), one, zero)


def _repeat_heads(g: Any, value: Any, heads: int) -> Any:
    """Return `value` with each head repeated, one after the other, until there are `heads`."""
    sizes = list(Symbolic.sizes(value))
    order = torch.arange(sizes[-3]).repeat_interleave(heads // sizes[-3])
    out = g.op("Gather", value, g.op("Constant", value_t=order), axis_i=len(sizes) - 3)
    sizes[-3] = heads
    out.setType(value.type().with_sizes(sizes))
    return out


def layer_norm(g: Any, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any, cudnn: Any) -> Any:
    """Export ``aten::layer_norm`` with a weight and a bias, whether the module has them or not.

    ORT demands the weight, and gives the gradients of missing ones the same empty name.
    """
    shape = Symbolic.integers(normalized_shape, "normalized_shape")
    dtype = Symbolic.dtype(input)
    if Symbolic.is_none(weight):
        weight = g.op("Constant", value_t=torch.ones(shape, dtype=dtype))
    if Symbolic.is_none(bias):
        bias = g.op("Constant", value_t=torch.zeros(shape, dtype=dtype))
    epsilon = Symbolic.number(eps, "eps")
    # the gradient reads mean and deviation, which are the other two outputs
    out, *_ = g.op("LayerNormalization", input, weight, bias, epsilon_f=epsilon, axis_i=-len(shape), outputs=3)
    out.setType(input.type())
    return out


def permute(g: Any, self: Any, dims: Any) -> Any:
    """Export ``aten::permute``, dimensions counted from the end too: ONNX's Transpose knows no negative ones."""
    order = Symbolic.integers(dims, "dims")
    return g.op("Transpose", self, perm_i=[dim % len(order) for dim in order])


def flatten(g: Any, self: Any, start_dim: Any, end_dim: Any) -> Any:
    """Export ``aten::flatten``, dimensions counted from the end too; torch's own takes a negative start for axis 0."""
    node = Symbolic.traced(g, self, start_dim, end_dim)
    rank = max(node.inputs[0].rank, 1)
    start, end = (Symbolic.integer(dim, "dim") % rank for dim in (start_dim, end_dim))
    if start == end:
        return g.op("Identity", self) if node.inputs[0].rank else g.op("Reshape", self, _constant(g, [1]))
    # 0 keeps a size as it is
    shape = g.op(
        "Concat",
        _constant(g, [0] * start + [-1]),
        *([Symbolic.slice(g, g.op("Shape", self), 0, end + 1, rank)] if end + 1 < rank else []),
        axis_i=0,
    )
    return g.op("Reshape", self, shape)


def unflatten(g: Any, self: Any, dim: Any, sizes: Any) -> Any:
    """Export ``aten::unflatten`` to sizes of which one may vary; torch's own computes the axis in the graph.

    Raises:
        ValueError: more of them vary, or one behind the axis; then PyTorch runs it.
    """
    value = Symbolic.traced(g, self, dim, sizes).inputs[0]
    axis = Symbolic.integer(dim, "dim") % value.rank
    behind = value.known_sizes[axis + 1 :]
    new = [-1 if size is None else size for size in Symbolic.items(sizes, "sizes")]
    if new.count(-1) > 1 or None in behind:
        raise ValueError("unflatten to several sizes that vary")
    # 0 keeps a size as it is; from the shape of a value the exporter would take the sizes of the trace
    before = [0] * axis if -1 in new else [-1, *[0] * (axis - 1)][:axis]
    return g.op("Reshape", self, _constant(g, [*before, *new, *behind]))


def _constant(g: Any, values: int | list[int]) -> Any:
    return g.op("Constant", value_t=torch.tensor(values))


def adaptive_avg_pool2d(g: Any, self: Any, output_size: Any) -> Any:
    """Export ``aten::adaptive_avg_pool2d`` to one element for each channel as a mean; others run in PyTorch."""
    rank = Symbolic.traced(g, self, output_size).inputs[0].rank
    return g.op("ReduceMean", self, axes_i=[rank - 2, rank - 1], keepdims_i=1)


def as_strided(g: Any, self: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Export ``aten::as_strided`` of a tensor whose layout in memory is the same for all sizes of the graph's inputs.

    Raises:
        Unexportable: it is not, so that strides of the trace would pick other elements.
    """
    value = Symbolic.traced(g, self, size, stride, storage_offset).inputs[0]
    expected = 1
    for axis in reversed(range(value.rank)):
        known = value.known_sizes[axis]
        if value.traced_strides is None or value.traced_strides[axis] != expected or (axis and known is None):
            raise Unexportable(
                "as_strided reads memory by strides that depend on the sizes or on the layout of its input: use unfold"
            )
        expected *= known or 1
    return Symbolic.original("aten::as_strided", g.opset)(g, self, size, stride, storage_offset)


def squeeze(g: Any, self: Any, dim: Any = None) -> Any:
    """Export ``aten::squeeze`` of the sizes that are 1 in the trace; torch's own puts others into an If."""
    node = Symbolic.traced(g, self, *([] if dim is None else [dim]))
    value, removed = node.inputs[0], node.inputs[0].rank - node.outputs[0].rank
    if dim is None:
        axes = list(range(value.rank))
    else:
        axes = [axis % max(value.rank, 1) for axis in _as_integers(dim) if value.rank]
    # an argument of the module shows no sizes, since they may change; the rank of the result tells
    axes = [axis for axis in axes if value.traced_sizes[axis] in (1, None)] if removed else []
    if len(axes) != removed:
        raise Unexportable("squeeze of an argument removes some of several axes: name those axes alone")
    return g.op("Squeeze", self, _constant(g, axes)) if axes else g.op("Identity", self)


def _as_integers(value: Any) -> list[int]:
    return Symbolic.integers(value, "dim") if Symbolic.is_list(value) else [Symbolic.integer(value, "dim")]


def eye(g: Any, *arguments: Any) -> Any:
    """Export ``aten::eye``, also where a tensor is given to write into: torch's own has no form for that."""
    if len(arguments) > 3:
        return Symbolic.original("aten::eye", g.opset)(g, *arguments)
    *sizes, out = arguments
    one = g.op("Constant", value_t=torch.tensor([1]))
    axes = [g.op("Reshape", size, one) for size in (sizes if len(sizes) == 2 else sizes * 2)]
    zeros = g.op("ConstantOfShape", g.op("Concat", *axes, axis_i=0), value_t=torch.zeros(1, dtype=Symbolic.dtype(out)))
    return g.op("EyeLike", zeros)


def repeat_interleave(g: Any, self: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Any:
    """Export ``aten::repeat_interleave`` along one axis as an Expand, whose sizes shape inference follows.

    torch's own takes the tensor apart, and changes the constant that holds a negative dimension, for all.
    """
    rank = Symbolic.traced(g, self, repeats, dim, output_size).inputs[0].rank
    if Symbolic.is_none(dim) or rank is None:
        return Symbolic.original("aten::repeat_interleave", g.opset)(g, self, repeats, dim, output_size)
    axis = Symbolic.integer(dim, "dim") % rank
    count = g.op("Cast", g.op("Unsqueeze", repeats, _constant(g, [0])), to_i=7)  # TensorProto.INT64
    one = _constant(g, [1])
    times = [one] * axis + [count] + [one] * (rank - axis - 1)
    expanded = g.op("Unsqueeze", self, _constant(g, [axis + 1]))
    expanded = g.op("Expand", expanded, g.op("Concat", *times[:axis], one, *times[axis:], axis_i=0))
    sizes = g.op("Mul", g.op("Shape", self), g.op("Concat", *times, axis_i=0))
    return g.op("Reshape", expanded, sizes, allowzero_i=1)


def where(g: Any, condition: Any, self: Any = None, other: Any = None, _outputs: int | None = None) -> Any:
    """Export ``aten::where`` so that the gradients have the shapes of the operands.

    ORT's gradient of Where does not sum over what was broadcast, so that is done by an Expand of its own.
    """
    plain = Symbolic.original("aten::where", g.opset)
    if self is None:
        return plain(g, condition, _outputs=_outputs)
    node = Symbolic.traced(g, condition, self, other)
    result = node.outputs[0]
    operands = [
        _expanded(g, value, result, [other for other in node.inputs if other is not value]) for value in node.inputs[1:]
    ]
    if result.scalar_type in _WITHOUT_WHERE:
        operands = [g.op("Cast", value, to_i=_INT32) for value in operands]
    return _cast_back(g, plain(g, condition, *operands), result)


def masked_fill(g: Any, self: Any, mask: Any, value: Any) -> Any:
    """Export ``aten::masked_fill``, with tensors that are broadcast by an Expand; see :func:`where`."""
    node = Symbolic.traced(g, self, mask, value)
    result = node.outputs[0]
    filled = _expanded(g, node.inputs[0], result, [node.inputs[1]])
    if node.inputs[2].requires_grad:
        value = _expanded(g, node.inputs[2], result, node.inputs[:2])
    if result.scalar_type in _WITHOUT_WHERE:
        filled = g.op("Cast", filled, to_i=_INT32)
    return _cast_back(g, Symbolic.original("aten::masked_fill", g.opset)(g, filled, mask, value), result)


_WITHOUT_WHERE = {"Bool": 9, "Char": 3, "Short": 5}
"""TorchScript's name of element types for which ORT has no Where, to their numbers in ONNX."""
_INT32, _INT64 = 6, 7


def _cast_back(g: Any, selected: Any, result: TracedValue) -> Any:
    """Return what Where has selected as the element type of `result`, if Where had to work on integers instead."""
    kind = result.scalar_type or ""
    return g.op("Cast", selected, to_i=_WITHOUT_WHERE[kind]) if kind in _WITHOUT_WHERE else selected


def _expanded(g: Any, value: TracedValue, result: TracedValue, others: list[TracedValue]) -> Any:
    """Return `value` expanded to the shape that it has together with `others`, if it may be smaller than `result`."""
    if not value.is_floating or value.is_constant or (value.rank == 0 and not value.requires_grad):
        return value.converted
    known = value.known_sizes
    smaller = value.rank < result.rank or value.traced_sizes != result.traced_sizes
    full = _known(others, result)
    if not smaller and not any(size == 1 and whole != 1 for size, whole in zip(known, full, strict=True)):
        return value.converted
    out = value.converted
    for other in others:
        if other.rank:
            out = g.op("Expand", out, g.op("Shape", other.converted))
    out.setType(value.converted.type().with_sizes([None] * result.rank))
    return out


def _known(values: list[TracedValue], result: TracedValue) -> list[int | None]:
    """Return the sizes that `values` have when broadcast together, as far as they do not vary."""
    sizes: list[int | None] = [1] * result.rank
    for value in values:
        for axis, size in enumerate(value.known_sizes, start=result.rank - value.rank):
            if size != 1:
                sizes[axis] = size
    return sizes


def gather(g: Any, self: Any, dim: Any, index: Any, sparse_grad: Any = None) -> Any:
    """Export ``aten::gather``; an index below 0 is an error."""
    return Symbolic.original("aten::gather", g.opset)(g, self, dim, _from_the_start(g, index), sparse_grad)


def index(g: Any, self: Any, indices: Any) -> Any:
    """Export ``aten::index`` by several tensors as a GatherND, which counts places below 0 from the end of their axis.

    torch's own computes places in the flattened tensor, of which those below 0 and behind the end lie in other rows.

    Raises:
        ValueError: a mask of several axes is among them, or a mask beside others; then PyTorch runs it.
    """
    node = Symbolic.traced(g, self, indices)
    given = node.inputs[1].items or []
    axes = [axis for axis, value in enumerate(given) if value.is_tensor]
    masks = [value for value in given if value.is_tensor and value.scalar_type in ("Bool", "Byte")]
    if masks and (len(axes) > 1 or (len(given) > 1 and masks[0].rank != 1)):
        raise ValueError("an index by masks and other tensors, or by a mask of several axes behind a slice")
    if len(axes) < 2 or any(given[axis].scalar_type is None for axis in axes):
        return Symbolic.original("aten::index", g.opset)(g, self, indices)
    places = [g.op("Cast", given[axis].converted, to_i=_INT64) for axis in axes]
    nothing = places[0]
    for place in places[1:]:
        nothing = g.op("Add", g.op("Mul", nothing, _constant(g, 0)), g.op("Mul", place, _constant(g, 0)))
    last = _constant(g, [-1])
    columns = [g.op("Unsqueeze", g.op("Add", place, nothing), last) for place in places]
    others = [axis for axis in range(node.inputs[0].rank) if axis not in axes]
    if others and axes != list(range(len(axes))):
        self = g.op("Transpose", self, perm_i=[*axes, *others])
    out = g.op("GatherND", self, g.op("Concat", *columns, axis_i=-1))
    before = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    if before:  # what is put together takes the place of adjacent axes
        first = node.outputs[0].rank - len(others)
        kept = list(range(first, first + len(others)))
        out = g.op("Transpose", out, perm_i=[*kept[:before], *range(first), *kept[before:]])
    return out


def index_select(g: Any, self: Any, dim: Any, index: Any) -> Any:
    """Export ``aten::index_select``; an index below 0 is an error."""
    return Symbolic.original("aten::index_select", g.opset)(g, self, dim, _from_the_start(g, index))


def scatter(g: Any, self: Any, dim: Any, index: Any, src: Any) -> Any:
    """Export ``aten::scatter``; an index below 0 is an error."""
    return Symbolic.original("aten::scatter", g.opset)(g, self, dim, _from_the_start(g, index), src)


def one_hot(g: Any, self: Any, num_classes: Any) -> Any:
    """Export ``aten::one_hot``; a class below 0 or behind the last one is an error.

    ONNX has the row of another class, or one of zeros, for these; so they are looked up in a table of the classes.
    """
    node = Symbolic.traced(g, self, num_classes)
    classes = node.inputs[1].constant if node.inputs[1].is_constant else node.inputs[1].constant_number
    if classes is not None and classes > 0:
        kind = self.type()
        self = g.op("Gather", _constant(g, list(range(classes))), _from_the_start(g, self), axis_i=0)
        self.setType(kind)
    return Symbolic.original("aten::one_hot", g.opset)(g, self, num_classes)


def _from_the_start(g: Any, index: Any) -> Any:
    """Return `index` for an operator of ONNX that counts places below 0 from the end, where PyTorch refuses them.

    They become places behind the end, which ONNX Runtime refuses too.
    """
    if index.node().kind() in _NEVER_NEGATIVE:
        return index
    dtype = Symbolic.dtype(index)
    zero, behind = (g.op("Constant", value_t=torch.tensor(v, dtype=dtype)) for v in (0, torch.iinfo(dtype).max))
    out = g.op("Where", g.op("Less", index, zero), behind, index)
    out.setType(index.type())
    return out


_NEVER_NEGATIVE = frozenset(("onnx::ArgMax", "onnx::ArgMin", "onnx::NonZero", "onnx::TopK"))
"""Operators whose integers are places from the start."""


def unfold(g: Any, self: Any, dimension: Any, size: Any, step: Any) -> Any:
    """Export ``aten::unfold`` by an operator of PyTorch's whose result is no view."""
    return g.op("org.pytorch.aten::ATen", self, dimension, size, step, operator_s=UNFOLD)


TABLE: dict[str, Callable] = {
    "::adaptive_avg_pool2d": adaptive_avg_pool2d,
    "::as_strided": as_strided,
    "::constant_pad_nd": constant_pad_nd,
    "::cumsum": cumsum,
    "::diff": diff,
    "::embedding": embedding,
    "::eye": eye,
    "::flatten": flatten,
    "::gather": gather,
    "::index": index,
    "::index_select": index_select,
    "::layer_norm": layer_norm,
    "::one_hot": one_hot,
    "::pad": pad,
    "::permute": permute,
    "::squeeze": squeeze,
    "::unflatten": unflatten,
    "::unfold": unfold,
    "::masked_fill": masked_fill,
    "::masked_fill_": masked_fill,
    "::where": where,
    "::repeat_interleave": repeat_interleave,
    "::scatter": scatter,
    "::scaled_dot_product_attention": scaled_dot_product_attention,
}
"""``"::name"`` of an ATen operator to its symbolic; wins over ORT's own."""


def add_symbolic(operator: str, symbolic: Callable) -> None:
    """Export an operator by a symbolic function of your own, as ``torch.onnx.register_custom_op_symbolic`` takes it.

    Args:
        operator: ``"aten::gelu"``.
        symbolic: ``symbolic(g, *arguments)`` returns the value made by ``g.op(...)``.
    """
    TABLE[operator.replace("aten::", "::", 1)] = symbolic
