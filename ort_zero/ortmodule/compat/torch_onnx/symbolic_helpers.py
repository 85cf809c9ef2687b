"""The private helpers of torch's exporter that our symbolics need, under plain names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_zero.ortmodule.compat.torch_onnx.exporter_modules import module_of
from ort_zero.ortmodule.compat.torch_onnx.traced import TracedNode


class Unexportable(BaseException):
    """A graph cannot hold an operator, and cannot run it in PyTorch by itself either; its module can.

    Not an Exception, so that ORT's own handlers let it pass.
    """


class Symbolic:
    """The private helpers of torch's exporter that our symbolics need."""

    @staticmethod
    def sizes(value):
        """Return the sizes of a traced value (None for unknown ones), or None if not even the rank is known."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_tensor_sizes(value)

    @staticmethod
    def integer(value, name: str) -> int:
        """Return the constant integer that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "i", name)

    @staticmethod
    def integers(value, name: str) -> list[int]:
        """Return the constant integers that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "is", name)

    @staticmethod
    def items(value, name: str) -> list[int | None]:
        """Return the integers that a traced argument holds, None for those that are no constants."""
        from torch.onnx import symbolic_helper

        if not symbolic_helper._is_packed_list(value):
            return [*Symbolic.integers(value, name)]
        return [
            symbolic_helper._get_const(item, "i", name) if symbolic_helper._is_constant(item) else None
            for item in value.node().inputs()
        ]

    @staticmethod
    def packed(value) -> list | None:
        """Return the traced values that a list is made of, None if it is no list that the trace makes."""
        from torch.onnx import symbolic_helper

        return [*value.node().inputs()] if symbolic_helper._is_packed_list(value) else None

    @staticmethod
    def is_list(value) -> bool:
        """Return True if a traced argument is a list."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._is_list(value) or symbolic_helper._is_constant(value) and _of_several(value)

    @staticmethod
    def number(value, name: str) -> float:
        """Return the constant float that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "f", name)

    @staticmethod
    def text(value, name: str) -> str:
        """Return the constant string that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "s", name)

    @staticmethod
    def traced(g, *converted) -> TracedNode:
        """Return the traced operator that is being exported, `converted` being its inputs."""
        return TracedNode(g.original_node, converted)

    @staticmethod
    def original(name: str, opset: int) -> Callable:
        """Return torch's own symbolic of an operator."""
        functions = module_of("registration").registry.get_function_group(name)._functions._base
        return functions[max(number for number in functions if number <= opset)]

    @staticmethod
    def dtype(value):
        """Return the torch dtype of a traced tensor."""
        from torch.onnx import JitScalarType

        return JitScalarType.from_value(value).dtype()

    @staticmethod
    def is_none(value) -> bool:
        """Return True if a traced argument is None."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._is_none(value) or value.node().mustBeNone()

    @staticmethod
    def slice(g, value, axis: int, start: int, end: int):
        """Return the traced value of ``value[start:end]`` along `axis`."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._slice_helper(g, value, axes=[axis], starts=[start], ends=[end])

    @staticmethod
    def onnx_type(dtype: int) -> int:
        """Return the ONNX element type of a dtype as the tracer numbers it."""
        from torch.onnx import JitScalarType  # the facade is kept by every torch so far

        kind: Any = JitScalarType(dtype).onnx_type()
        return int(kind)


def _of_several(value) -> bool:
    return value.node().kind() == "onnx::Constant" and value.node().t("value").dim() > 0
