"""Import onnxruntime-training's ORTModule on a torch that it was not made for, for an engine."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from ort_zero.compat import versions
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
    with _quiet(), root_logger_kept():
        package = importlib.import_module(PACKAGE)
        # the first export would import it, and show what it warns of
        importlib.import_module("onnxruntime.training.utils.hooks")
    hooks.patch_ranges()
    hooks.patch_ortmodule()
    extensions.load()
    return package


_WARNINGS = (
    # a CPU build of onnxruntime says that it has no CUDA version
    (UserWarning, r"WARNING: failed to get cudart_version", r"onnxruntime\.capi\.onnxruntime_validation"),
    # ORT's own ZeRO-3 subscriber, which is not used, misses names in current DeepSpeed
    (UserWarning, r"DeepSpeed import error", r"onnxruntime\.training\.utils\.hooks\."),
    # ORTModule reads every attribute of a model, deprecated properties among them
    *((category, "", rf"{name}\.") for category in (FutureWarning, DeprecationWarning)
      for name in ("transformers", "onnxruntime")),
)  # fmt: skip
"""Warnings of dependencies about their own internals, which no user can act on: category, text and module."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence :data:`_WARNINGS` in the block, which must not run user code."""
    with warnings.catch_warnings():
        for category, message, module in _WARNINGS:
            warnings.filterwarnings("ignore", message, category, module)
        yield


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Restore handlers and level of the root logger, which a tool of onnxruntime configures when it is imported.

    If a handler stayed, a later ``logging.basicConfig`` of the user's program would do nothing.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)
