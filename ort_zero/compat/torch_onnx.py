"""Makes the TorchScript exporter of today's torch answer to the names that onnxruntime-training 1.19.2 imports.

torch 2.9 and later keep the exporter under ``torch.onnx._internal.torchscript_exporter``; the old public modules are
gone or facades without the private helpers. Aliases are added to ``sys.modules``; nothing of torch is changed.
"""

from __future__ import annotations

import importlib
import sys

_HOME = "torch.onnx._internal.torchscript_exporter"
_MOVED_INTERNAL = ("jit_utils", "registration", "onnx_proto_utils")
_MOVED_PUBLIC = ("_globals", "_type_utils")
_OPSETS = range(7, 21)
_aliased = False


def alias_exporter_modules() -> None:
    """Register the moved exporter modules under their old names; a second call does nothing."""
    global _aliased
    if _aliased:
        return
    import torch.onnx

    internal = sys.modules["torch.onnx._internal"]
    for name in _MOVED_INTERNAL:
        _alias(f"torch.onnx._internal.{name}", f"{_HOME}.{name}", internal, name)
    for name in _MOVED_PUBLIC:
        _alias(f"torch.onnx.{name}", f"{_HOME}.{name}", torch.onnx, name)
    for opset in _OPSETS:
        # ORT's symbolics import private helpers (_convolution, ...), which the public facades no longer have
        name = f"symbolic_opset{opset}"
        _alias(f"torch.onnx.{name}", f"{_HOME}.{name}", torch.onnx, name)
    _aliased = True


def _alias(old: str, new: str, parent: object, attribute: str) -> None:
    try:
        module = importlib.import_module(new)
    except ImportError:
        return  # an older torch, which still has the old name
    sys.modules[old] = module
    setattr(parent, attribute, module)


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
    def is_none(value) -> bool:
        """Return True if a traced argument is None."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._is_none(value) or value.node().mustBeNone()

    @staticmethod
    def slice(g, value, axis: int, start: int, end: int):
        """Return ``value[start:end]`` along `axis`."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._slice_helper(g, value, axes=[axis], starts=[start], ends=[end])

    @staticmethod
    def onnx_type(dtype: int) -> int:
        """Return the ONNX element type of a dtype as the tracer numbers it."""
        from torch.onnx import JitScalarType  # the facade is kept by every torch so far

        return int(JitScalarType(dtype).onnx_type())
