"""Imports onnxruntime-training's ORTModule on a torch that it was not made for."""

from __future__ import annotations

import importlib
from typing import Any

from ort_zero.compat import third_party, versions
from ort_zero.ortmodule.compat import cpu_allocator, extensions
from ort_zero.ortmodule.compat.torch_onnx import STOP_GRADIENT, exporter_modules

PACKAGE = "onnxruntime.training.ortmodule"
_package: Any = None


def import_ortmodule() -> Any:
    """Return the package ``onnxruntime.training.ortmodule``, importable on this torch, extensions loaded.

    Builds the C++ extensions if they are not in the cache, and lets PyTorch allocate tensors on the CPU by one of them.
    The names of torch's exporter that the package imports, also later, are there from then on, until the patches of
    :mod:`ort_zero.ortmodule.compat.torch_onnx.exporter_modules` are restored.

    Raises:
        UnsupportedVersionError: a package is missing or out of range.
        BuildError: the extensions cannot be built.
    """
    global _package
    if _package is not None:
        return _package
    versions.say_untested(versions.require("ort"))
    old_names = exporter_modules.patch_set()
    were_there = old_names.active
    old_names.apply()
    try:
        _package = _import()
    except BaseException:
        if not were_there:
            old_names.restore()
        raise
    return _package


def _import() -> Any:
    # a tool of onnxruntime configures the root logger when it is imported
    with third_party.quiet(), third_party.root_logger_kept():
        modules = extensions.load_modules()
        cpu_allocator.install(modules["cpu_allocator"])
        package = importlib.import_module(PACKAGE)
        # the first export would import it, and show what it warns of
        importlib.import_module("onnxruntime.training.utils.hooks")
        extensions.install_into(package)
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    # registered with ORT when the first ORTModule is made
    CustomGradientRegistry.register_custom_stop_gradient_edges([0], "org.pytorch.aten", "ATen", STOP_GRADIENT, "")
    return package


def run_aten_nodes() -> None:
    """Let every session of the process run ATen nodes, also one that belongs to no ORTModule."""
    import_ortmodule()
    from onnxruntime.training.ortmodule.torch_cpp_extensions.cpu.aten_op_executor import (
        load_aten_op_executor_cpp_extension,
    )

    load_aten_op_executor_cpp_extension()


def is_ortmodule(obj: Any) -> bool:
    """Return True if `obj` is an ORTModule; imports nothing."""
    return _package is not None and isinstance(obj, _package.ORTModule)
