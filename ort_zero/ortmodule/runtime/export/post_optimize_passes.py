"""Changes gradient graphs that ORT has built, and could not run as they are.

The graph builder runs :func:`name_all_results` on each of them, the others on those for the CPU.
"""

from __future__ import annotations

import re

import numpy as np
import onnx
from onnx import helper, numpy_helper

_OF_GRADIENTS = re.compile(r"[A-Z]\w*Constant_Type(1|10|11|16)")
"""Names that ORT's gradient builder gives to constants of floating-point numbers (``gradient_builder_base.h``)."""


def name_all_results(model: onnx.ModelProto) -> int:
    """Give the results of ATen nodes that nothing reads a name, in place; return how many there were.

    ORT leaves out gradients that nobody wants, those of frozen weights, but its kernel wants a place for each result.
    """
    graph, named = model.graph, 0
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.input)}
    for node in graph.node:
        dtype = next((types[name] for name in (*node.output, *node.input) if types.get(name)), None)
        if node.op_type != "ATen" or dtype is None:
            continue
        for i, name in enumerate(node.output):
            if not name:
                node.output[i] = f"ort_zero_unread_{named}"
                graph.value_info.append(helper.make_tensor_value_info(node.output[i], dtype, None))
                named += 1
    return named


def constants_without_dimensions(model: onnx.ModelProto) -> int:
    """Take the one dimension from the constants that ORT's gradients multiply and divide by; return their number.

    The gradient of the square root of a number has one dimension with them: half of it is a constant of shape (1,). A
    sum over axes further back then sums over the wrong ones.
    """
    users: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, set()).add(node.op_type)
    changed = 0
    for tensor in model.graph.initializer:
        if (
            _OF_GRADIENTS.fullmatch(tensor.name)
            and list(tensor.dims) == [1]
            and users.get(tensor.name, set()) <= {"Add", "Div", "Mul", "Pow", "Sub"}
        ):
            del tensor.dims[:]
            changed += 1
    return changed


def unfuse_for_cpu(model: onnx.ModelProto) -> int:
    """Replace ScaledSum, BatchScale and IsAllFinite by what they were made of, in place; return how many there were.

    ``ScaledSumFusion`` and ``IsInfReduceSumFusion`` of onnxruntime-training 1.19.2 ask no provider, and these have CUDA
    kernels only.
    """
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.value_info}
    nodes, replaced = [], 0
    for node in model.graph.node:
        if node.domain != "com.microsoft" or node.op_type not in ("ScaledSum", "BatchScale", "IsAllFinite"):
            nodes.append(node)
            continue
        replaced += 1
        if node.op_type == "IsAllFinite":
            nodes += _nothing_infinite(node, f"ort_zero_IsAllFinite_{replaced}")
            continue
        scales = {a.name: a.f for a in node.attribute}
        name = f"ort_zero_{node.op_type}_{replaced}"
        dtype = helper.tensor_dtype_to_np_dtype(types.get(node.output[0]) or types.get(node.input[0]) or 1)
        count = len(node.input) if node.op_type == "ScaledSum" else len(node.output)
        products = [f"{name}/product_{i}" for i in range(count)]
        for i in range(count):
            source = node.input[i] if node.op_type == "ScaledSum" else node.input[0]
            target = products[i] if node.op_type == "ScaledSum" else node.output[i]
            if not target:
                continue
            factor = numpy_helper.from_array(np.array(scales[f"scale_{i}"], dtype=dtype))
            nodes.append(helper.make_node("Constant", [], [f"{name}/scale_{i}"], f"{name}/constant_{i}", value=factor))
            nodes.append(helper.make_node("Mul", [source, f"{name}/scale_{i}"], [target], f"{name}/mul_{i}"))
        if node.op_type == "ScaledSum":
            nodes.append(helper.make_node("Sum", products, list(node.output), f"{name}/sum"))
    if replaced:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return replaced


def accept_empty_batches(model: onnx.ModelProto) -> int:
    """Replace each Gemm without a bias by a FusedMatMul, in place; return how many there were.

    ORT's Gemm refuses to sum over nothing: the gradient of a layer's weight where the batch, or the part of it that a
    mask has selected, is empty. Both are the same product of matrices.
    """
    replaced = 0
    for node in model.graph.node:
        if node.op_type == "Gemm" and not node.domain and (len(node.input) < 3 or not node.input[2]):
            replaced += 1
            del node.input[2:]
            node.op_type, node.domain = "FusedMatMul", "com.microsoft"
            kept = [attribute for attribute in node.attribute if attribute.name in ("alpha", "transA", "transB")]
            del node.attribute[:]
            node.attribute.extend(kept)
    return replaced


def _nothing_infinite(node: onnx.NodeProto, name: str) -> list[onnx.NodeProto]:
    """Return nodes that compute what an IsAllFinite does: whether none of its inputs has an infinite element, or NaN.

    The fusion asks for infinite elements only; both flags together would ask for nothing.
    """
    flags = {attribute.name: attribute.i for attribute in node.attribute}
    kinds = [kind for kind, other in (("IsInf", "isnan_only"), ("IsNaN", "isinf_only")) if not flags.get(other)]
    nodes, found = [], []
    for i, source in enumerate(node.input):
        for kind in kinds:
            value = f"{name}/{kind}_{i}"
            nodes.append(helper.make_node(kind, [source], [value], value))
            nodes.append(
                helper.make_node("Cast", [value], [f"{value}/float"], f"{value}/cast", to=onnx.TensorProto.FLOAT)
            )
            nodes.append(
                helper.make_node("ReduceMax", [f"{value}/float"], [f"{value}/any"], f"{value}/max", keepdims=0)
            )
            found.append(f"{value}/any")
    nodes.append(helper.make_node("Max", found, [f"{name}/any"], f"{name}/max"))
    nodes.append(helper.make_node("Cast", [f"{name}/any"], [f"{name}/bool"], f"{name}/cast", to=onnx.TensorProto.BOOL))
    nodes.append(helper.make_node("Not", [f"{name}/bool"], list(node.output), f"{name}/not"))
    return nodes
