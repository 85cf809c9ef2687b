"""Apply the patches of ORTModule and of torch's exporter, once for the process."""

from __future__ import annotations

import threading

from ort_zero.backends import registry

_PATCHING = threading.Lock()


def name_exporter_modules() -> None:
    """Give the modules of torch's exporter the names by which ORTModule's package imports them.

    Raises:
        UnsupportedVersionError: a version is out of range, so that more than names would be missing.
    """
    from ort_zero.compat import versions
    from ort_zero.ortmodule.compat.torch_onnx import exporter_modules

    if "torch.onnx" in registry.patch_sets:
        return
    versions.require("ort")
    old_names = exporter_modules.patch_set()
    old_names.apply()
    registry.patch_sets["torch.onnx"] = old_names


def patch_ranges() -> None:
    """Let ORT's profiling ranges do nothing on a torch without CUDA; a second call does nothing."""
    from ort_zero.ortmodule.compat.ortmodule.patches import range_patches

    registry.apply("profiling ranges", range_patches)


def patch_statistics() -> None:
    """Let upstream's collection of statistics name ort_zero's; a second call does nothing."""
    from ort_zero.ortmodule.compat.ortmodule.patches import statistics_patches

    registry.apply("statistics", statistics_patches)


def patch_ortmodule() -> None:
    """Apply the patches of ORTModule, all or nothing; a second call does nothing.

    Called when the first model is wrapped, since it imports onnxruntime; threads may wrap models side by side.

    Raises:
        UnsupportedVersionError: Python, torch, onnx or onnxruntime-training is missing or out of range.
    """
    with _PATCHING:
        if "onnxruntime" not in registry.patch_sets:
            _patch_ortmodule()


def _patch_ortmodule() -> None:
    from ort_zero.compat import versions

    versions.require("ort")  # before the imports below, which need onnx

    from ort_zero.ortmodule.compat import ortmodule, torch_ddp
    from ort_zero.ortmodule.compat.torch_onnx import exporter_modules
    from ort_zero.ortmodule.runtime.operators import symbolics
    from ort_zero.ortmodule.runtime.zero3 import gather_reduce
    from ort_zero.utils.patching import PatchSet

    old_names = exporter_modules.patch_set()
    were_there = old_names.active
    old_names.apply()
    try:
        ortmodule.import_ortmodule()
        patch_ranges()
        wanted = PatchSet(
            "onnxruntime",
            (
                *ortmodule.patches(),
                *ortmodule.symbolic_patches(symbolics.TABLE),
                *torch_ddp.patches(gather_reduce.reduced_behind),
            ),
        )
        wanted.apply()
    except BaseException:
        if not were_there:
            old_names.restore()
        raise
    registry.patch_sets.update({"torch.onnx": old_names, "onnxruntime": wanted})
