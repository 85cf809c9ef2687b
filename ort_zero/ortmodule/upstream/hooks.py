"""What to do after the imports of modules of onnxruntime-training. Nothing heavy is imported at module level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_zero.ortmodule.upstream import PACKAGE
from ort_zero.runtimes import registry


def import_hooks() -> dict[str, Callable[[Any], None]]:
    """Return the functions to call once a module of onnxruntime-training has been imported, by the module's name."""
    return {
        # the first module that ORTModule's package imports, before those that need torch's old names
        f"{PACKAGE}._fallback_exceptions": lambda _: name_exporter_modules(),
        # the last one: a package that is only being imported is not yet complete
        f"{PACKAGE}.ortmodule": lambda _: patch_ortmodule(),
        # imported without ORTModule by programs that collect statistics of a plain PyTorch model
        "onnxruntime.training.utils.torch_profile_utils": lambda _: patch_ranges(),
    }


def name_exporter_modules() -> None:
    """Give the modules of torch's exporter their old names; a second call does nothing.

    Raises:
        UnsupportedVersionError: a version is out of range, so that more than names would be missing.
    """
    from ort_zero.compat import versions
    from ort_zero.ortmodule.upstream import names

    if "torch.onnx" not in registry.patch_sets:
        versions.require("ort")
        registry.apply("torch.onnx", names.patches)


def patch_ortmodule() -> None:
    """Apply the patches of ORTModule's package, all or nothing; a second call does nothing.

    Raises:
        UnsupportedVersionError: a version is out of range.
        PatchError: a target has an unknown shape, or another library patched it.
    """
    from ort_zero.compat import versions
    from ort_zero.ortmodule.upstream import patches

    if "ORTModule" not in registry.patch_sets:
        versions.require("ort")
        registry.apply("ORTModule", patches.ortmodule_patches)


def patch_ranges() -> None:
    """Let upstream's profiling ranges do nothing on a torch without CUDA; a second call does nothing."""
    from ort_zero.ortmodule.upstream import patches

    registry.apply("profiling ranges", patches.range_patches)
