"""Takes apart what ORT's optimizer fused into operators that only its CUDA provider can run.

The graph builder runs this pass on each gradient graph that is to run on the CPU.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def unfuse_for_cpu(model: onnx.ModelProto) -> int:
    """Replace ScaledSum and BatchScale by products and sums, in place; return how many there were.

    ``ScaledSumFusion`` of onnxruntime-training 1.19.2 asks no provider, and the two have CUDA kernels only.
    """
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.value_info}
    nodes, replaced = [], 0
    for node in model.graph.node:
        if node.domain != "com.microsoft" or node.op_type not in ("ScaledSum", "BatchScale"):
            nodes.append(node)
            continue
        replaced += 1
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
