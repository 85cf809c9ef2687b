"""Runs ORT's symbolic shape inference (1.19.2, ``onnxruntime/tools/symbolic_shape_infer.py``) over a whole model.

Upstream stops at the first operator whose rule fails. Here the results of such an operator get unknown sizes instead,
see :mod:`ort_zero.compat.shape_inference_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def infer_shapes(model: Any, infer_python_op: Callable) -> Any:
    """Return `model` with the types and shapes of its values, as far as they can be known; changes `model`.

    Where sizes depend on values, operands are broadcast by nodes of their own, see :mod:`ort_zero.compat.data_sizes`.

    Args:
        model: ONNX ModelProto.
        infer_python_op: ``(node, input shapes, input types) -> output shapes or None``, with None for unknown sizes;
            called for the nodes of PyTorch functions.
    """
    from ort_zero.compat.data_sizes import let_sizes_differ
    from ort_zero.compat.shape_inference_rules import LastingShapeInference

    let_sizes_differ(model)
    inference = LastingShapeInference(2**31 - 1, True, True, 0)
    inference.infer_python_op = infer_python_op
    inference.infer_all(model)
    return inference.out_mp_
