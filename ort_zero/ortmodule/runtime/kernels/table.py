"""The kernels that a gradient graph for the CPU gets in place of ORT's, and what each of them gains.

``benchmarks/kernels.py`` measures every entry beside ORT's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Replacement:
    """One entry: which nodes it takes, and what stands in their place.

    Attributes:
        name: by which it is switched off, and which ``status()`` tells.
        operators: of ORT, whose nodes are replaced.
        condition: in words; nodes that do not meet it keep ORT's kernel.
        kernel: that runs instead.
        gain: ORT's time over the kernel's, as measured.
        features: the vector instructions, by PyTorch's names, with which it pays; empty for all of them.
    """

    name: str
    operators: tuple[str, ...]
    condition: str
    kernel: str
    gain: str
    features: frozenset[str] = frozenset()


TABLE = (
    Replacement(
        "long_product",
        ("MatMul", "FusedMatMul", "Gemm"),
        "float32, a second matrix of known sizes, 1,024 products in a sum or more, 64 columns or more",
        "oneDNN's, with the bias that is added",
        "1.05 to 1.3 with AVX-512",
        frozenset(("AVX512",)),
    ),
    Replacement("gelu", ("BiasGelu", "Gelu"), "float32", "aten::gelu", "1.6, 1.7 with AVX-512"),
    Replacement(
        "gelu_gradient",
        ("FastGeluGrad", "GeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX"),
        "float32",
        "aten::gelu_backward",
        "10.1 (FastGeluGrad), 4.8 (GeluGrad), 2.7 and 8.7 (with bias) with AVX-512; 2.9 to 5.5 with AVX2 alone",
    ),
    Replacement(
        "cross_entropy",
        ("SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLossInternalGrad"),
        "float32, two dimensions, mean or sum, no weights of classes, the label to ignore is constant",
        "softmax in blocks of rows, which keeps neither log-probabilities nor zeros for logits without a gradient",
        "3.6 with AVX-512, 2.9 with AVX2, forward and backward together",
    ),
    Replacement(
        "weight_gradient",
        ("Gemm",),
        "float32, transA alone, no bias, alpha 1",
        "aten::tensordot",
        "1.07 to 1.44 with AVX2; with AVX-512 0.5 to 0.7, where ORT's kernel stays",
        frozenset(("AVX2",)),
    ),
    Replacement(
        "relu_gradient",
        ("ReluGrad",),
        "float32",
        "aten::threshold_backward",
        "20 to 30 with AVX-512",
    ),
    Replacement(
        "batch_norm",
        ("PythonOp", "PythonOpGrad"),
        "a batch norm of the statistics of its batch, with weight, bias and running statistics, float32",
        "aten::native_batch_norm and its gradient, without Python's autograd and copies of what it saves",
        "see the benchmark",
    ),
    Replacement(
        "convolution",
        ("Conv", "ConvGrad"),
        "float32, two dimensions, kernels larger than 1, 144 products in a sum or more, the same padding on both sides",
        "aten::convolution and aten::convolution_backward",
        "1.1 to 2.1 and 1.4 to 1.9 with AVX-512",
        frozenset(("AVX512",)),
    ),
    Replacement(
        "layer_norm",
        ("LayerNormalization",),
        "float32, over the last dimension, of a size that is known, with weight and bias",
        "aten::native_layer_norm",
        "2.0 to 3.2 with AVX-512",
    ),
    Replacement(
        "rms_norm",
        ("SimplifiedLayerNormalization",),
        "float32, over the last dimension, of a size that is known",
        "products and means in blocks of rows",
        "1.4 to 1.9 with AVX-512",
    ),
    Replacement(
        "rms_norm_gradient",
        ("SimplifiedLayerNormalizationGrad",),
        "float32, over the last dimension, of a size that is known, 512 or more",
        "products in blocks of rows",
        "1.2 to 1.6 with AVX-512",
    ),
    Replacement(
        "layer_norm_gradient",
        ("LayerNormalizationGrad",),
        "float32, over the last dimension, of a size that is known",
        "aten::native_layer_norm_backward",
        "3.0 with AVX-512, 2.7 with AVX2",
    ),
)
"""The entries in the order in which they are tried."""


def chosen(kept: list[str], instructions: str) -> frozenset[str]:
    """Return the names of the entries to use.

    Args:
        kept: glob patterns of names for which ORT's kernels stay.
        instructions: the vector instructions that PyTorch uses, by its name for them.
    """
    return frozenset(
        entry.name
        for entry in TABLE
        if not any(fnmatchcase(entry.name, glob) for glob in kept)
        and (not entry.features or instructions in entry.features)
    )
