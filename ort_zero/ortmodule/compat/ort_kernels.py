"""What ONNX Runtime 1.19 calls things in a training graph, and what its CPU kernels do with memory.

Read in ``recompute_graph_utils.h``, ``graph_viewer.cc`` and the kernels' definitions; the sizes of scratch memory were
measured. Contract tests compare predicted with measured peaks.
"""

from __future__ import annotations

RECOMPUTED = "_recompute"
"""Suffix that ORT's memory optimizer gives to the name of a copy, and of each value that the copy computes."""
BACKWARD = "__backwardpass"
"""Attribute by which ORT's priorities recognise a node of the backward."""
BARRIER = "YieldOp"
"""Operator between forward and backward: what it reads goes to the caller, what it returns comes from the caller."""

ALIASES = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
"""Operators whose kernels say Alias(0, 0): the result is the input's memory."""
SCRATCH = {
    "Where": 2,
    "Sum": 1,
    "FastGelu": 1,
    "BiasGelu": 1,
    "BiasGeluGrad_dX": 1,
    "BiasFastGeluGrad_dX": 1,
    "LogSoftmaxGrad": 1,
    "LogSoftmaxGrad_13": 1,
}
"""Memory that a kernel takes from the arena while it runs, in sizes of its first result: the CPU's Where selects twice,
then merges; Sum has a result of each two inputs, the last one apart; a Gelu adds its bias first. The other kernels of
transformers' graphs take none, measured too."""
SCRATCH_FROM = {"Sum": 3, "FastGelu": 2}
"""Number of inputs from which a kernel of :data:`SCRATCH` takes any."""
HEAP = {
    "SoftmaxCrossEntropyLossInternal": 1,
    "SoftmaxCrossEntropyLoss": 1,
    "LayerNormalizationGrad": 4,
    "SimplifiedLayerNormalizationGrad": 4,
}
"""Memory that a kernel takes from the heap while it runs, in sizes of its first operand: shifted logits, products of
matrices that are not merged."""
FROM_TORCH = frozenset((BARRIER, "ATen", "PythonOp", "PythonOpGrad"))
"""Operators whose results are tensors of PyTorch's, outside of ORT's arena."""
UNFOLD = "unfold_copy"
"""Operator of ATen nodes for ``aten::unfold``, whose own result is a view: ORT would free and reuse its memory."""

ATEN_IN_PLACE = {"ort_zero_loss::scaled": 1, "ort_zero_loss::scaled_sum": 1, "ort_zero_loss::add_rows": 0}
"""Operators of ATen nodes that write their result into the memory of an input, and which one that is."""
FUSED_LOSS = "ort_zero_loss::loss"
"""How the names of the operators begin that compute a head and its loss: of hidden states [..., width] and a weight
[classes, width]."""
LOGITS_AT_ONCE = 1 << 23
"""Number of logits that such an operator computes at a time, if its last input says nothing else."""


def loss_slice(logits: int) -> int:
    """Return how many classes' gradients of the weight are computed at a time by an operator of :data:`FUSED_LOSS`.

    Args:
        logits: number of logits that it computes at a time.
    """
    return 1 << 12 if logits >= LOGITS_AT_ONCE else 1 << 10


def loss_copies(operator: str) -> int:
    """Return how many of the last results of an operator of :data:`FUSED_LOSS` are copies of its weight and bias."""
    if not operator.endswith("_copies"):
        return 0
    return 2 if operator.endswith("_bias_copies") else 1


LOSS_BUFFERS = 3 << 20
"""Bytes that PyTorch's products take inside of such an operator, measured."""

PRODUCTS = frozenset(("MatMul", "FusedMatMul", "Gemm"))
"""Operators that multiply matrices."""
NEW_MEMORY = PRODUCTS | {
    "ReduceSum", "GatherGrad", "ConvGrad", "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"
}  # fmt: skip
"""Operators whose kernels write each result into memory of its own, never into that of an input.

Checked for ORT's CPU provider: the planner lets values share memory where a kernel's definition says Alias,
VariadicAlias, MayInplace or MayStridedOutput (core/framework/allocation_planner.cc), and the definitions of these say
nothing of the kind (core/providers/cpu/{math/matmul,math/gemm,reduction/reduction_ops}.cc,
contrib_ops/cpu/fusedmatmul.cc, orttraining/training_ops/cpu/{tensor/gather_grad,nn/conv_grad,nn/layer_norm}.cc).
The files were read at other commits than that of 1.19.2; a contract test runs the kernels of the installed version.
"""
ONLY_READ = frozenset(
    ("Shape", "Size", "SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad", "Gather", "ReduceMean")
)
"""More operators whose kernels never write a result into the memory of an input."""
ATEN_NEW_MEMORY = frozenset(
    (
        "embedding_backward",
        "aten::embedding_backward",
        "native_layer_norm_backward",
        "tensordot",
        "ort_zero_loss::scaled",
        "ort_zero_loss::scaled_sum",
        "ort_zero_loss::add_rows",
    )
)
"""Operators of ATen nodes whose results are tensors of PyTorch's in memory of which no other value is read any more."""
EFFECTS = frozenset((BARRIER, "PythonOp", "PythonOpGrad", "BatchNormalization", "BatchNormInternal"))
"""Operators that do something besides computing their results: Python code, running statistics that are changed in
place."""
