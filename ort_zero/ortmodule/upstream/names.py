"""Give the modules of torch's TorchScript exporter the names by which onnxruntime-training 1.19.2 imports them.

torch 2.9 and later keep the exporter under ``torch.onnx._internal.torchscript_exporter``. The old public modules are
gone, or facades without the private helpers that ORTModule's symbolics import. No module of torch is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

from ort_zero.utils.patching import Patch

HOME = "torch.onnx._internal.torchscript_exporter"
_OLD_PARENTS = {
    "torch.onnx._internal": ("jit_utils", "registration", "onnx_proto_utils"),
    "torch.onnx": ("_globals", "_type_utils", *(f"symbolic_opset{opset}" for opset in range(7, 21))),
}
"""The modules that have moved, by the package that older versions of torch have them in."""


def patches() -> Iterator[Patch]:
    """Yield the patches that give the modules their old names; none for a torch that still has the old names."""
    for parent, names in _OLD_PARENTS.items():
        for name in names:
            if not _is_there(name):
                continue

            def moved(_: object, name: str = name) -> ModuleType:
                return importlib.import_module(f"{HOME}.{name}")

            for target in (f"sys:modules[{parent}.{name}]", f"{parent}:{name}"):
                why = "the name by which onnxruntime-training imports a module of the exporter"
                yield Patch(target=target, build=moved, why=why, may_be_new=True)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{HOME}.{name}") is not None
    except ModuleNotFoundError:
        return False
