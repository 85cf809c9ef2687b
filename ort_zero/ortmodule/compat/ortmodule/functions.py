"""ORT's registries: autograd Functions that PythonOp nodes call, symbolics, element types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SYMBOLICS = "onnxruntime.training.ortmodule._custom_op_symbolic_registry:CustomOpSymbolicRegistry._SYMBOLICS"
"""ORT's own table of symbolics, by ``"domain::name"``; every ORTModule registers it. The target of patches."""


def register_function(name: str, function: type) -> None:
    """Make the autograd Function `function` callable by PythonOp nodes as `name`."""
    from onnxruntime.capi import _pybind_state

    _pybind_state.register_torch_autograd_function(name, function)


def register_aten_gradient(operator: str, nodes: Sequence[tuple[str, list[str], list[str]]]) -> None:
    """Tell ORT's gradient builder the gradient of an ATen node.

    Args:
        operator: with its namespace.
        nodes: operator, inputs and outputs of each node of the gradient, in ORT's names: ``"GO(i)"`` is the gradient of
            an output, ``"GI(i)"`` that of an input, ``"I(i)"`` and ``"O(i)"`` are the values. ``"Shape"`` is ONNX's
            operator, any other one is that of an ATen node.
    """
    from onnxruntime.capi import _pybind_state
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    definition = _to_gradient_definition([
        (name, inputs, outputs)
        if name == "Shape"
        else (("ATen", "org.pytorch.aten"), inputs, outputs, {"operator": {"value": name, "dtype": "string"}})
        for name, inputs, outputs in nodes
    ])  # fmt: skip
    _pybind_state.register_gradient_definition(f"org.pytorch.aten::ATen::{operator}::", definition)


def with_all_gradients(function: Any) -> type:
    """Return the autograd Function `function` with zeros in place of the gradients that its backward leaves out.

    ORT asks for the gradient of every input that leads to a weight, and gives None on to the next node as it is.
    """
    import torch

    def note(ctx, inputs):
        ctx.ort_zero_inputs = [
            (t.shape, t.dtype, t.device) if isinstance(t, torch.Tensor) and t.is_floating_point() else None
            for t in inputs
        ]

    def forward(ctx, *inputs):
        note(ctx, inputs)
        return function.forward(ctx, *inputs)

    def setup_context(ctx, inputs, output):
        note(ctx, inputs)
        return function.setup_context(ctx, inputs, output)

    def backward(ctx, *gradients):
        found = function.backward(ctx, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(
            torch.zeros(like[0], dtype=like[1], device=like[2]) if gradient is None and like is not None else gradient
            for gradient, like in zip(found, ctx.ort_zero_inputs, strict=False)
        )

    if function.setup_context is not torch.autograd.Function.setup_context:
        own = {"setup_context": staticmethod(setup_context), "forward": staticmethod(function.forward)}
    else:
        own = {"forward": staticmethod(forward)}
    # ORT registers what derives from torch's class directly, and nothing else
    return type(function.__name__, (torch.autograd.Function,), {**own, "backward": staticmethod(backward)})


def registered_shapes(node: Any, input_shapes: list, input_types: list) -> list | None:
    """Return the shapes by the rule that a user's autograd Function brought along, if it has one."""
    from onnxruntime.capi._pybind_state import get_shape_inference_function

    name = next(a.s.decode() for a in node.attribute if a.name == "func_name")
    rule = get_shape_inference_function(name)
    return rule(node, input_shapes, input_types)[0] if rule is not None else None


def contiguous(tensor: Any) -> Any:
    """Return `tensor` laid out row by row, as ORT takes it: PyTorch calls every layout of no elements contiguous."""
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def onnx_type(torch_dtype: Any) -> int:
    """Return the ONNX element type of a torch dtype."""
    from onnxruntime.training.utils import pytorch_type_to_onnx_dtype

    return int(pytorch_type_to_onnx_dtype(torch_dtype))
