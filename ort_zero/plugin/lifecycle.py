"""Switches the plugin on and off, and says what it does.

Nothing heavy is imported at module level: :func:`autoload` runs at the end of every ``import torch``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ort_zero import env
from ort_zero.plugin import registry

_HOOKED_MODULE = "deepspeed.runtime.engine"
_state: dict[str, Any] = {"armed": False, "auto_error": None}


class _WaitForDeepSpeed:
    """Arms wrapt's hook when DeepSpeed begins to be imported: wrapt alone takes longer to import than we may."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing; at the first sight of DeepSpeed step aside for wrapt."""
        if name == "deepspeed":
            sys.meta_path.remove(_WaitForDeepSpeed)  # type: ignore[arg-type]
            _arm()


def autoload() -> None:
    """Arm the hook that enables ort_zero when DeepSpeed's engine is imported. Never raises.

    Called by torch through the entry point ``torch.backends``; an exception here would break ``import torch``.
    """
    try:
        if env.disabled() or _state["armed"]:
            return
        _state["armed"] = True
        if "deepspeed" in sys.modules:
            _arm()
        else:
            sys.meta_path.insert(0, _WaitForDeepSpeed)  # type: ignore[arg-type]
    except Exception as error:
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _arm() -> None:
    try:
        from wrapt.importer import register_post_import_hook

        register_post_import_hook(_enable_quietly, _HOOKED_MODULE)
    except Exception as error:
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _enable_quietly(module: Any) -> None:
    """Enable; on failure say so once and keep the reason for :func:`status`.

    DeepSpeed then works as ever, except for a config with an enabled section: what the user asked for cannot be had,
    and training in PyTorch without a word is not the answer.
    """
    try:
        enable()
    except Exception as error:
        _state["auto_error"] = str(error)
        from ort_zero.log import get_logger

        get_logger().warning("not enabled, DeepSpeed is left as it is: %s", error)
        try:
            from ort_zero.plugin.refused_section import patch
            from ort_zero.utils.patching import PatchSet

            wanted = PatchSet("refused_section", (patch(str(error)),))
            wanted.apply()
            registry.patch_sets[wanted.name] = wanted
        except Exception:  # not even an engine that could be patched: the warning has to do
            get_logger().debug("an enabled section will not be refused", exc_info=True)


def enable() -> None:
    """Patch DeepSpeed, all or nothing; a second call does nothing. ``ORT_ZERO_DISABLE=1`` makes it do nothing.

    Raises:
        UnsupportedVersionError: DeepSpeed is missing or out of range.
        PatchError: an engine exists already, DeepSpeed's code has an unknown shape, or another library patched it.
    """
    if env.disabled() or is_enabled():
        return
    from ort_zero.compat import versions

    registry.restore("refused_section")
    versions.require("zero")
    _refuse_late()
    importlib.import_module(_HOOKED_MODULE)
    if is_enabled():
        return  # the armed hook has just done it
    from ort_zero.distributed import gloo_exit
    from ort_zero.plugin import engine_patch, fp32_patch
    from ort_zero.utils.patching import PatchSet
    from ort_zero.zero3_hooks import patches as hook_patches

    wanted = PatchSet("deepspeed", (*engine_patch.PATCHES, *hook_patches.PATCHES, *fp32_patch.patches()))
    wanted.apply()
    registry.patch_sets["deepspeed"] = wanted
    _state["auto_error"] = None
    gloo_exit.settle_at_exit()


def disable() -> None:
    """Put back the very objects that were there.

    Engines that exist keep the hooks that they have, and run on where PyTorch runs the model; a model in ONNX Runtime
    cannot be called any more.

    Raises:
        PatchError: somebody patched one of our targets after us; nothing is changed then.
    """
    was_enabled = is_enabled()
    registry.restore("refused_section", "onnxruntime", "torch.onnx", "deepspeed")
    if was_enabled:
        from ort_zero.compat import third_party

        third_party.unsilence()


def is_enabled() -> bool:
    """Return True between :func:`enable` and :func:`disable`."""
    return "deepspeed" in registry.patch_sets


def status() -> dict[str, Any]:
    """Return what is patched, which graph runs, and why, as plain values.

    Keys: ``enabled``, ``reason`` (why not, or None), ``patches`` (targets), ``models`` (one for each engine whose
    section asks for ONNX Runtime, the newest one last, until it is destroyed or gone: what has run it (``backend``:
    ``"onnxruntime"``, ``"torch"`` or ``"not called yet"``), graphs, runs, gathers, reduces, transitions, fallback
    reason, and in ``called_in_torch`` the methods other than forward that PyTorch has run, with the number of calls of
    modules that they made) and ``fallbacks`` (sum).
    """
    models = [runtime.status() for runtime in registry.runtimes()]
    reason = "ORT_ZERO_DISABLE is set" if env.disabled() else _state["auto_error"]
    return {
        "enabled": is_enabled(),
        "reason": reason,
        "patches": [target for patch_set in registry.patch_sets.values() for target in patch_set.targets()],
        "models": models,
        "fallbacks": sum(model["fallbacks"] for model in models),
    }


def _refuse_late() -> None:
    """Raise if a DeepSpeed engine was made before: its hooks are in place, it would be half ours."""
    module = sys.modules.get(_HOOKED_MODULE)
    engine_class = getattr(module, "DeepSpeedEngine", None)
    if engine_class is None:
        return
    import gc

    from ort_zero.errors import PatchError

    if any(issubclass(type(obj), engine_class) for obj in gc.get_objects()):
        raise PatchError(
            "ort_zero.enable() was called after a DeepSpeed engine had been made; call it before "
            "deepspeed.initialize() (or let the entry point do it: install ort_zero with pip)"
        )
