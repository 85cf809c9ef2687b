"""Tables of the operators that run in PyTorch inside the graph although the exporter knows them, each with the reason.

:mod:`.fallback_policy` reads them for each operator that is exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_zero.ortmodule.compat.torch_onnx import TracedNode, TracedValue


def _known_value(value: TracedValue | None) -> Any:
    """Return what an argument is for every size of the graph's inputs; None if it is not known, or not given."""
    if value is None:
        return None
    return value.constant if value.is_constant else value.constant_number


def _grouped(node: TracedNode) -> str | None:
    groups = node.argument("groups")
    if groups is None or 1 in (groups.constant_number, groups.constant if groups.is_constant else None):
        return None
    return "ONNX Runtime's gradient of a convolution in groups is wrong on the CPU"


def _not_constant_padding(node: TracedNode) -> str | None:
    mode = node.argument("mode")
    if node.name == "aten::pad" and (mode is None or (mode.is_constant and mode.constant == "constant")):
        return None
    return "ONNX Runtime has no gradient for this mode of Pad"


def _putting(node: TracedNode) -> str | None:
    if node.inputs[2].requires_grad and not node.inputs[2].rank:
        return "ONNX Runtime's gradient of Where does not sum over what was broadcast"
    if _broadcasts_into_places(node):
        return "torch's exporter does not broadcast what is put into places"
    accumulate = node.argument("accumulate")
    if accumulate is None or _known_value(accumulate):
        return "torch's exporter gives the updates another shape than ONNX wants"
    return None


def _broadcasts_into_places(node: TracedNode) -> bool:
    """Return True if the values of an index_put may have another shape than the places, as far as the trace shows."""
    target, places, values = node.inputs[:3]
    indices = places.items or []
    if not indices or any(index.is_tensor and index.scalar_type is None for index in indices):
        return False  # the exporter's own form of an assignment to a slice
    if not values.rank:
        # the exporter lays a mask of the first axes along the last ones
        partial = any(i.scalar_type in ("Bool", "Byte") and i.rank != target.rank for i in indices if i.is_tensor)
        return len(indices) > 1 or partial or any(not index.is_tensor for index in indices)
    if len(indices) != 1 or not indices[0].is_tensor or indices[0].scalar_type in ("Bool", "Byte"):
        return True
    return values.traced_sizes != [*indices[0].traced_sizes, *target.traced_sizes[1:]]


def _of_vectors(node: TracedNode) -> str | None:
    vectors = 1 in (v.rank for v in node.inputs)
    return "ONNX Runtime's gradient of MatMul is wrong for vectors" if vectors else _without_columns(node)


def _without_columns(node: TracedNode) -> str | None:
    if any(0 in value.known_sizes for value in node.inputs if value.is_tensor and value.rank):
        return "ONNX Runtime's gradient of MatMul fails for matrices without rows or columns"
    return None


def _variable_exponent(node: TracedNode) -> str | None:
    return "ONNX Runtime has no gradient for the exponent of Pow" if node.inputs[1].requires_grad else None


def _flipped(node: TracedNode) -> str | None:
    return "ONNX Runtime's gradient of Slice takes no negative steps" if node.inputs[0].requires_grad else None


def _of_real_numbers(node: TracedNode) -> str | None:
    return "torch's exporter asks integers, to which numbers below 1 are 0" if node.inputs[0].is_floating else None


def _of_a_number(node: TracedNode) -> str | None:
    return "ONNX counts a dimension for a number" if node.inputs[0].rank == 0 else None


def _rounding_down(node: TracedNode) -> str | None:
    # numbers that are sizes stay in the graph: they are positive
    return "torch's exporter rounds quotients towards zero" if node.outputs[0].rank else None


def _of_integers(node: TracedNode) -> str | None:
    return None if node.inputs[0].is_floating else "ONNX Runtime computes with floating-point numbers there"


def _limited_by_tensors(node: TracedNode) -> str | None:
    if any(value.is_tensor and (value.rank or value.requires_grad) for value in node.inputs[1:]):
        return "ONNX Runtime divides the gradient among equal operands of Min and Max"
    return None


def _partly_used(node: TracedNode) -> str | None:
    value = node.inputs[0]
    if not value.requires_grad:
        return None
    axis = _known_value(node.argument("dim"))
    if axis is None or value.known_sizes[axis] is None:
        return "the parts depend on the sizes of the graph's inputs"
    if all(out.leads_to_gradient for out in node.outputs):
        return None
    return "ONNX Runtime's gradient of Split leaves out results that nothing depends on"


def _without_keepdim(node: TracedNode) -> str | None:
    if not node.inputs[0].requires_grad:
        return None
    if _known_value(node.argument("keepdim")):
        return None
    return "ONNX Runtime's gradients of ReduceL2 and ReduceLogSumExp are invalid without keepdim"


def _negative_start(node: TracedNode) -> str | None:
    known = _known_value(node.argument("start"))
    return "torch's exporter takes no start from the end" if known is None or known < 0 else None


def _of_product_alone(node: TracedNode) -> str | None:
    alone = _known_value(node.argument("beta")) == 0
    return "ONNX Runtime has no gradient for a Gemm without its third input" if alone else _without_columns(node)


def _of_probabilities(node: TracedNode) -> str | None:
    return "ONNX's loss takes classes only, no probabilities" if node.inputs[1].is_floating else None


def _counted(node: TracedNode) -> str | None:
    repeats = node.argument("repeats")
    if repeats is None or not repeats.is_tensor or (repeats.rank == 0 and repeats.constant_number != 0):
        return None
    return "torch's exporter gives its loop the wrong types"


def _convolving(node: TracedNode) -> str | None:
    padding = node.argument("padding")
    if padding is not None and padding.is_constant and padding.constant == "same":
        return 'ONNX Runtime knows no dilation together with padding "same", and its gradient leaves the padding out'
    return _grouped(node)


def _steps_of_sizes(node: TracedNode) -> str | None:
    steps = node.argument("steps")
    known = steps is None or steps.is_constant or steps.constant_number is not None
    return None if known else "ONNX Runtime crashes on its gradient where the number of steps is a size"


_SIZES_OF_POOLING = "ONNX Runtime takes the sizes of its result for those that it is combined with"


def _to_more_than_one(node: TracedNode) -> str | None:
    sizes = node.inputs[1]
    known = sizes.constant if sizes.is_constant else tuple(s.constant for s in sizes.items or [] if s.is_constant)
    return None if known == (1, 1) else _SIZES_OF_POOLING


def _to_one(node: TracedNode) -> str | None:
    return _SIZES_OF_POOLING if 1 in node.outputs[0].traced_sizes[-2:] else None


def _scaled_unevenly(node: TracedNode) -> str | None:
    factors = node.argument("scale_factors")
    if factors is None or (factors.is_constant and factors.constant is None):
        return None
    values = factors.constant if factors.is_constant else [item.constant for item in factors.items or ()]
    if values and all(value is not None and float(value).is_integer() for value in values):
        return None
    return "ONNX Runtime's gradient takes the ratio of the sizes for the scale factor"


def _sampling(node: TracedNode) -> str | None:
    modes = [_known_value(node.argument(name)) for name in ("interpolation_mode", "padding_mode")]
    inexact = modes[0] not in (0, 1) or modes[1] not in (0, 1)  # bilinear and nearest; zeros and border
    return "ONNX Runtime samples otherwise with bicubic interpolation, and where it reflects" if inexact else None


def _dividing(node: TracedNode) -> str | None:
    mode = node.argument("rounding_mode")
    rounds = mode is not None and mode.is_constant and mode.constant == "trunc"
    # results without dimensions are sizes, unless they have a gradient
    of_values = node.outputs[0].rank or node.outputs[0].requires_grad
    if rounds and of_values and any(value.is_floating for value in node.inputs[:2] if value.is_tensor):
        return "torch's exporter rounds by way of integers, which hold neither NaN nor large numbers, nor a gradient"
    return None


def _of_one_number(node: TracedNode) -> str | None:
    return None if node.outputs[0].rank else "torch's exporter gives the result of a number a dimension"


_PADDINGS = tuple(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)) + ("_pad_circular",)
_RECURRENT = "ONNX Runtime trains recurrent layers in one direction and on the CPU only"
_PACKED = "ONNX has no packed sequences"
_TOWARDS_ZERO = "torch's exporter rounds negative numbers towards zero"
_SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
_RESIZING = ("nearest1d", "nearest2d", "nearest3d", "bicubic2d", "bilinear2d", "linear1d", "trilinear3d")
_CONVOLUTIONS = ("_convolution", "convolution", "_convolution_mode", "conv1d", "conv2d", "conv3d")

IN_TORCH: dict[str, str | Callable[[TracedNode], str | None]] = {
    "aten::batch_norm": "ONNX Runtime keeps other running statistics than PyTorch",
    **{f"aten::upsample_{name}": _scaled_unevenly for name in _RESIZING},
    "aten::nan_to_num": _of_one_number,
    **dict.fromkeys(("aten::any", "aten::all"), _of_real_numbers),
    **dict.fromkeys(("aten::nonzero", "aten::nonzero_numpy"), _of_a_number),
    "aten::grid_sampler": _sampling,
    "aten::div": _dividing,
    **dict.fromkeys(("aten::softshrink", "aten::hardshrink"), "ONNX Runtime gives 0 for NaN"),
    "aten::cdist": "ONNX Runtime has no gradient for an input that is used twice in one Concat",
    "aten::flip": _flipped,
    "aten::index_copy": "the exporter's shapes are wrong",
    "aten::index_put": _putting,
    **dict.fromkeys(("aten::index_add", "aten::scatter_add"), "ONNX Runtime is wrong where an index occurs twice"),
    "aten::masked_scatter": "ONNX Runtime's gradient is wrong",
    "aten::matmul": _of_vectors,
    "aten::mv": _of_vectors,
    **dict.fromkeys(("aten::linear", "aten::mm", "aten::bmm"), _without_columns),
    "aten::dot": _of_vectors,
    "aten::pow": _variable_exponent,
    "ort_zero::setitem": "torch's exporter does not broadcast what is assigned, and keeps sizes of the first batch",
    **dict.fromkeys(("aten::_pack_padded_sequence", "aten::_pad_packed_sequence"), _PACKED),
    **dict.fromkeys(("aten::_unique2", "aten::unique_dim"), "ONNX returns the places of elements as one row"),
    "aten::fake_quantize_per_tensor_affine": "ONNX Runtime wants constant scales",
    "aten::embedding_bag": "ONNX Runtime has no gradient for Loop",
    "aten::floor_divide": _rounding_down,
    "aten::fmod": _of_integers,
    **dict.fromkeys(
        ("aten::__rshift__", "aten::__rshift_", "aten::bitwise_right_shift"),
        "torch's exporter rounds negative numbers towards zero",
    ),
    **dict.fromkeys(("aten::clamp", "aten::clamp_min", "aten::clamp_max", "aten::clip"), _limited_by_tensors),
    **{f"aten::{name}": _partly_used for name in _SPLITS},
    **{f"aten::{name}": _without_keepdim for name in ("norm", "frobenius_norm")},
    **{f"aten::linalg_{name}": _without_keepdim for name in ("norm", "vector_norm", "matrix_norm")},
    "aten::logsumexp": "ONNX Runtime's gradient is not a number where all elements are -inf",
    **dict.fromkeys(
        ("aten::std", "aten::std_mean"), "the gradient of the exporter's form is not a number for a deviation of 0"
    ),
    "aten::pairwise_distance": "torch's exporter leaves out the absolute value",
    "aten::log1p": "the exporter's form loses the digits of small numbers",
    "aten::cosine_similarity": "the gradient of the exporter's form is not a number for vectors of zeros",
    "aten::log_sigmoid": "the exporter's form overflows",
    "aten::binary_cross_entropy_with_logits": "the exporter's form overflows",
    "aten::scatter_reduce": "ONNX Runtime crashes on its gradient",
    "aten::diagonal": "ONNX Runtime's gradient of its diagonal needs known shapes",
    "aten::narrow": _negative_start,
    "aten::linspace": _steps_of_sizes,
    "aten::addmm": _of_product_alone,
    "aten::index_fill": "torch's exporter does not know its own shapes there",
    **dict.fromkeys(("aten::movedim", "aten::moveaxis"), "torch's exporter writes dimensions that ONNX does not know"),
    "aten::tile": "torch's exporter writes an If whose branches differ in type",
    "aten::repeat_interleave": _counted,
    "aten::cross_entropy_loss": _of_probabilities,
    "aten::adaptive_avg_pool2d": _to_more_than_one,
    **dict.fromkeys(("aten::max_pool2d", "aten::max_pool2d_with_indices", "aten::avg_pool2d"), _to_one),
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), _RECURRENT),
    **{f"aten::{name}": _not_constant_padding for name in ("pad", *_PADDINGS)},
    **{f"aten::{name}": _convolving for name in _CONVOLUTIONS},
}
"""Operators that run in PyTorch inside the graph although the exporter knows them: name to reason, or to a function
that returns the reason or None.

Operators without a symbolic, and those whose ONNX form ORT cannot differentiate, need no entry.
"""

WITHOUT_GRADIENT = frozenset(
    "Acos Acosh Asin Asinh Atan Atanh Celu Cosh CumSum DepthToSpace Det Einsum Elu GlobalLpPool "
    "GlobalMaxPool GridSample GroupNormalization HardSigmoid HardSwish InstanceNormalization LRN "
    "LpNormalization LpPool MaxRoiPool MaxUnpool MeanVarianceNormalization Mish Mod "
    "NegativeLogLikelihoodLoss PRelu RNN ReduceL1 ReduceLogSum ReduceMax ReduceMin ReduceProd "
    "ReduceSumSquare Resize ReverseSequence RoiAlign Selu Shrink Sinh Softplus Softsign SpaceToDepth Tan "
    "ThresholdedRelu Upsample".split()
)
"""ONNX operators of real numbers that onnxruntime-training 1.19.2 has no gradient for on every provider."""

WRONG_GRADIENT = {
    **dict.fromkeys(
        ("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SplitToSequence"),
        "ONNX Runtime has no gradient for sequences",
    ),
    "AveragePool": "ONNX Runtime's gradient of AveragePool needs sizes that never vary",
    "MaxPool": "ONNX Runtime's gradient of MaxPool needs sizes that never vary",
}
"""ONNX operators whose gradient in onnxruntime-training 1.19.2 is no good, each with the reason."""


def run_in_torch(operator: str, why: str = "asked for") -> None:
    """Run an ATen operator, or one that a package registered with PyTorch, in PyTorch inside every graph.

    Args:
        operator: ``"aten::gelu"``, ``"torchvision::nms"``.
        why: a phrase for ``status()``.
    """
    IN_TORCH[operator] = why
