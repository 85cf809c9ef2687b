"""Makes the TorchScript exporter of today's torch answer to the names that onnxruntime-training 1.19.2 imports.

torch 2.9 and later keep the exporter under ``torch.onnx._internal.torchscript_exporter``; the old public modules are
gone, or facades without the private helpers. The old names become aliases; no module of torch is changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from types import ModuleType

from ort_zero.utils.patching import Patch, PatchSet

HOME = "torch.onnx._internal.torchscript_exporter"
_INTERNAL = ("jit_utils", "registration", "onnx_proto_utils")
"""Names of the modules that older versions of torch have in ``torch.onnx._internal``."""
# ORT's symbolics import private helpers (_convolution, ...), which the public facades of symbolic_opset* do not have
_PUBLIC = ("_globals", "_type_utils", *(f"symbolic_opset{opset}" for opset in range(7, 21)))
"""Names of the modules that older versions of torch have in ``torch.onnx``."""


def module_of(name: str) -> ModuleType:
    """Return a module of the exporter by the last part of its name, wherever this torch keeps it."""
    if _is_there(name):
        return importlib.import_module(f"{HOME}.{name}")
    return importlib.import_module(f"torch.onnx._internal.{name}" if name in _INTERNAL else f"torch.onnx.{name}")


@functools.cache
def patch_set() -> PatchSet:
    """Return the one set of patches that gives the exporter's modules their old names; empty for an older torch."""
    return PatchSet("torch.onnx", tuple(_patches()))


def _patches() -> Iterator[Patch]:
    for parent, names in (("torch.onnx._internal", _INTERNAL), ("torch.onnx", _PUBLIC)):
        for name in names:
            if not _is_there(name):
                continue  # an older torch, which still has the old name
            why = "the name by which onnxruntime-training imports a module of the exporter"

            def moved(_: object, name: str = name) -> ModuleType:
                return module_of(name)

            for target in (f"sys:modules[{parent}.{name}]", f"{parent}:{name}"):
                yield Patch(target=target, build=moved, why=why, may_be_new=True)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{HOME}.{name}") is not None
    except ModuleNotFoundError:
        return False


def legacy_exporter() -> dict[str, bool]:
    """Return the arguments by which ``torch.onnx.export`` takes the TorchScript exporter; torch 2.4 has no other."""
    import torch.onnx

    parameters = inspect.signature(torch.onnx.export).parameters
    # a program may have put a function of its own in the place of torch's, which takes whatever it is given
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"dynamo": False} if "dynamo" in parameters or takes_all else {}
