"""Graphs of one or two nodes that the table of kernels replaces, for the parity tests and the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_zero.ortmodule.compat.ortmodule import GraphInfo
from ort_zero.ortmodule.runtime.kernels.replace import replace_kernels

_MS = "com.microsoft"
_NO_INFO = GraphInfo(
    user_output_names=[],
    output_grad_indices_non_differentiable=[],
    output_grad_indices_require_full_shape=[],
    module_output_indices_requires_save_for_backward=[],
    frontier_node_arg_map={},
    cached_node_arg_names=[],
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A graph that holds what one entry of the table replaces, and values for its inputs."""

    entry: str
    label: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]

    def replaced(self) -> onnx.ModelProto:
        """Return the graph with the kernels of the table, whatever the processor is.

        Raises:
            ValueError: the entry replaces nothing in it.
        """
        model = onnx.ModelProto.FromString(self.model.SerializeToString())
        _, counts = replace_kernels(model, _NO_INFO, frozenset((self.entry,)))
        if not counts[self.entry]:
            raise ValueError(f"{self.label}: nothing was replaced by {self.entry}")
        return model


def kernel_cases(rows: int = 512, width: int = 256, classes: int = 8000, seed: int = 0) -> Iterator[KernelCase]:
    """Yield a case for each operator and form that the table takes.

    Args:
        rows: number of tokens.
        width: size of a hidden state; that of an MLP is four times as large.
        classes: number of classes of the cross entropy.
        seed: of the values.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    wide = 4 * width
    for operator in ("FastGeluGrad", "GeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX"):
        feeds = {"dy": normal(rows, wide), "x": 3 * normal(rows, wide)}
        if operator.startswith("Bias"):
            feeds["bias"] = normal(wide)
        node = helper.make_node(operator, list(feeds), ["dx"], operator, domain=_MS)
        yield _case("gelu_gradient", operator, [node], feeds, {"dx": [rows, wide]})
    for operator in ("Gelu", "BiasGelu"):
        feeds = {"x": 3 * normal(rows, wide)} | ({"bias": normal(wide)} if operator == "BiasGelu" else {})
        node = helper.make_node(operator, list(feeds), ["y"], operator, domain=_MS)
        yield _case("gelu", operator, [node], feeds, {"y": [rows, wide]})
    yield _layer_norm(normal, rows, width)
    yield from _norms(normal, rows, width)
    for m, n in ((width, width), (width, wide), (wide, width), (classes, width)):
        feeds = {"a": normal(rows, m), "b": normal(rows, n)}
        product = helper.make_node("Gemm", ["a", "b"], ["product"], "product", transA=1)
        yield _case("weight_gradient", f"Gemm [{m}, {n}]", [product], feeds, {"product": [m, n]})
    yield from _long_products(normal, rows, width)
    yield from _image_cases(normal, width)
    for reduction in ("mean", "sum"):
        for ignored in (0.0, 0.5):
            yield _cross_entropy(random, normal, rows, classes, reduction, ignored)


def _image_cases(normal, width: int) -> Iterator[KernelCase]:
    """Yield cases of what networks for images consist of; that of a batch norm is a model."""
    feeds = {"dy": normal(8, 32, 16, 16), "y": np.maximum(normal(8, 32, 16, 16), 0)}
    node = helper.make_node("ReluGrad", list(feeds), ["dx"], "relu", domain=_MS)
    yield _case("relu_gradient", "ReluGrad", [node], feeds, {"dx": [8, 32, 16, 16]})
    few_positions = ((128, 128, 2, 3, 1, 1), (64, 128, 4, 3, 2, 1))
    forms = (
        (32, 32, 16, 3, 1, 1),
        (3, 32, 64, 7, 2, 1),
        (width // 8 * 8, 64, 8, 3, 2, 1),
        (64, 64, 8, 3, 1, 4),
        *few_positions,
    )
    for channels, made, size, kernel, stride, group in forms:
        pads = kernel // 2
        out = (size + 2 * pads - kernel) // stride + 1
        settings: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2}
        settings |= {"pads": [pads] * 4, "group": group}
        x, weight = normal(8, channels, size, size), normal(made, channels // group, kernel, kernel)
        label = f"{channels} to {made}, {kernel} x {kernel}, {size} x {size}, stride {stride}, group {group}"
        feeds = {"x": x, "w": weight, "bias": normal(made)}
        node = helper.make_node("Conv", list(feeds), ["y"], "convolution", **settings)
        yield _case("convolution", f"Conv {label}", [node], feeds, {"y": [8, made, out, out]})
        feeds = {"dy": normal(8, made, out, out), "x": x, "w": weight}
        results = {"dx": list(x.shape), "dw": list(weight.shape), "db": [made]}
        names = ["dx" if channels >= 16 else "", "dw", "db" if stride == 1 else ""]
        node = helper.make_node("ConvGrad", list(feeds), names, "gradient", domain=_MS, **settings)
        wanted = {name: shape for name, shape in results.items() if name in names}
        yield _case("convolution", f"ConvGrad {label}", [node], feeds, wanted)


def _layer_norm(normal, rows: int, width: int) -> KernelCase:
    x = normal(rows, width)
    mean = x.mean(1, keepdims=True)
    feeds = {
        "dy": normal(rows, width), "x": x, "scale": normal(width), "mean": mean,
        "deviation": 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5),
    }  # fmt: skip
    node = helper.make_node("LayerNormalizationGrad", list(feeds), ["dx", "dscale", "dbias"], "norm", domain=_MS)
    shapes = {"dx": [rows, width], "dscale": [width], "dbias": [width]}
    return _case("layer_norm_gradient", "LayerNormalizationGrad", [node], feeds, shapes)


def _norms(normal, rows: int, width: int) -> Iterator[KernelCase]:
    """Yield the forward of a layer norm, and forward and backward of a norm by the root of the mean square."""
    x, scale = normal(2, rows // 2, width), normal(width)
    feeds = {"x": x, "scale": scale, "bias": normal(width)}
    shapes = {"y": list(x.shape), "mean": [2, rows // 2, 1], "deviation": [2, rows // 2, 1]}
    node = helper.make_node("LayerNormalization", list(feeds), list(shapes), "norm", epsilon=1e-5)
    yield _case("layer_norm", "LayerNormalization", [node], feeds, shapes)
    feeds, shapes = {"x": x, "scale": scale}, {"y": list(x.shape), "deviation": [2, rows // 2, 1]}
    node = helper.make_node("SimplifiedLayerNormalization", list(feeds), list(shapes), "norm", epsilon=1e-6)
    yield _case("rms_norm", "SimplifiedLayerNormalization", [node], feeds, shapes)
    x, scale = normal(2, rows // 2, max(512, width)), normal(max(512, width))
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    feeds = {"dy": normal(*x.shape), "x": x, "scale": scale, "deviation": inverse}
    node = helper.make_node("SimplifiedLayerNormalizationGrad", list(feeds), ["dx", "dscale"], "norm", domain=_MS)
    shapes = {"dx": list(x.shape), "dscale": list(scale.shape)}
    yield _case("rms_norm_gradient", "SimplifiedLayerNormalizationGrad", [node], feeds, shapes)


def _long_products(normal, rows: int, width: int) -> Iterator[KernelCase]:
    """Yield what a linear layer of 1,024 inputs and more multiplies, forward and backward, in the forms of exports."""
    inputs, outputs = max(1024, 4 * width), max(64, width)
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs), normal(outputs)
    result = {"y": [rows, outputs]}
    swap = helper.make_node("Transpose", ["w"], ["swapped"], "swap", perm=[1, 0])
    product = helper.make_node("MatMul", ["x", "swapped"], ["product"], "product")
    add = helper.make_node("Add", ["bias", "product"], ["y"], "add")
    feeds = {"x": x, "w": weight, "bias": bias}
    label = f"[{inputs}, {outputs}]"
    yield _case("long_product", f"Transpose, MatMul, Add {label}", [swap, product, add], feeds, result)
    node = helper.make_node("Gemm", ["x", "w", "bias"], ["y"], "product", transB=1)
    yield _case("long_product", f"Gemm with a bias {label}", [node], feeds, result)
    node = helper.make_node("Gemm", ["x", "w", "bias"], ["y"], "product")
    yield _case("long_product", f"Gemm of a matrix as it is {label}", [node],
                {"x": x, "w": np.ascontiguousarray(weight.T), "bias": bias}, result)  # fmt: skip
    node = helper.make_node("FusedMatMul", ["dy", "swapped"], ["y"], "product", domain=_MS, transB=1)
    feeds = {"dy": normal(rows, inputs), "w": normal(inputs, outputs)}
    yield _case("long_product", f"Transpose, FusedMatMul {label}", [swap, node], feeds, result)


def _cross_entropy(random, normal, rows: int, classes: int, reduction: str, ignored: float) -> KernelCase:
    labels = random.integers(0, classes, rows)
    labels[random.random(rows) < ignored] = -100
    feeds = {"logits": 2 * normal(rows, classes), "labels": labels, "grad": np.array(1.5, np.float32)}
    ignore = helper.make_node("Constant", [], ["ignore"], "ignore", value=numpy_helper.from_array(np.array(-100)))
    loss = helper.make_node("SoftmaxCrossEntropyLossInternal", ["logits", "labels", "", "ignore"], ["loss", "log"],
                            "loss", domain=_MS, reduction=reduction, output_type=TensorProto.FLOAT)  # fmt: skip
    gradient = helper.make_node("SoftmaxCrossEntropyLossInternalGrad", ["grad", "log", "labels", "", "ignore"],
                                ["dlogits"], "gradient", domain=_MS, reduction=reduction,
                                output_type=TensorProto.FLOAT)  # fmt: skip
    label = f"cross entropy, {reduction}, {1 - ignored:.0%} labels"
    shapes = {"loss": [], "dlogits": [rows, classes]}
    return _case("cross_entropy", label, [ignore, loss, gradient], feeds, shapes)


def _case(
    entry: str,
    label: str,
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    results: dict[str, list[int]],
) -> KernelCase:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in results.items()]
    graph = helper.make_graph(nodes, "case", inputs, outputs)
    versions = [("", 14), (_MS, 1), ("org.pytorch.aten", 1)]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*version) for version in versions])
    model.ir_version = 8
    return KernelCase(entry, label, model, feeds)
