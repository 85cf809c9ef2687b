"""Import onnxruntime-training's ORTModule on a torch that it was not made for, for an engine."""

from __future__ import annotations

import importlib
from typing import Any

from ort_zero.compat import third_party, versions
from ort_zero.ortmodule.upstream import PACKAGE, extensions, hooks


def import_ortmodule() -> Any:
    """Return the package ``onnxruntime.training.ortmodule``, patched, with its C++ extensions loaded.

    Compiles the extensions if the cache lacks them. :func:`ort_zero.disable` undoes the patches.

    Raises:
        UnsupportedVersionError: Python, torch, onnx or onnxruntime-training is missing or out of range.
        BuildError: the extensions cannot be compiled or loaded.
    """
    versions.say_untested(versions.require("ort"))
    hooks.name_exporter_modules()
    # a tool of onnxruntime configures the root logger when it is imported
    with third_party.quiet(), third_party.root_logger_kept():
        package = importlib.import_module(PACKAGE)
        # the first export would import it, and show what it warns of
        importlib.import_module("onnxruntime.training.utils.hooks")
    hooks.patch_ranges()
    hooks.patch_ortmodule()
    extensions.load()
    return package
