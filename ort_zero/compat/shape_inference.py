"""Runs ORT's symbolic shape inference (1.19.2, ``onnxruntime/tools/symbolic_shape_infer.py``) over a whole model.

Upstream stops at the first operator whose rule fails. Here the results of such an operator get unknown sizes instead,
see :mod:`ort_zero.compat.shape_inference_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def infer_shapes(model: Any, infer_python_op: Callable) -> Any:
    """Return `model` with the types and shapes of its values, as far as they can be known.

    Args:
        model: ONNX ModelProto.
        infer_python_op: ``(node, input shapes, input types) -> output shapes or None``, with None for unknown sizes;
            called for the nodes of PyTorch functions.
    """
    from ort_zero.compat.shape_inference_rules import LastingShapeInference

    inference = LastingShapeInference(2**31 - 1, True, True, 0)
    inference.infer_python_op = infer_python_op
    inference._preprocess(model)
    while inference.run_:
        before = dict(inference.suggested_merge_)
        inference._infer_impl()
        if inference.suggested_merge_ == before:
            # upstream would try for ever to find the sizes of one node equal, and not get to the next
            inference.auto_merge_ = False
    inference._update_output_from_vi()
    return inference.out_mp_
