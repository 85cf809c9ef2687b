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
SCRATCH = {"Where": 2}
"""Memory that a kernel takes from the arena while it runs, in sizes of its first result: the CPU's Where selects twice,
then merges."""
HEAP = {"SoftmaxCrossEntropyLossInternal": 1, "SoftmaxCrossEntropyLoss": 1, "LayerNormalizationGrad": 4}
"""Memory that a kernel takes from the heap while it runs, in sizes of its first operand: shifted logits, products of
matrices that are not merged."""
FROM_TORCH = frozenset((BARRIER, "ATen", "PythonOp", "PythonOpGrad"))
"""Operators whose results are tensors of PyTorch's, outside of ORT's arena."""

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
    )
)
"""Operators of ATen nodes that write each result into memory of its own; they return tensors of PyTorch's."""
EFFECTS = frozenset((BARRIER, "PythonOp", "PythonOpGrad", "BatchNormalization", "BatchNormInternal"))
"""Operators that do something besides computing their results: Python code, running statistics that are changed in
place."""
