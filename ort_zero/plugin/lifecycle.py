"""Switch the plugin on and off, and report its state.

No large package is imported at module level: :func:`autoload` runs at the end of every ``import torch``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ort_zero import env
from ort_zero.plugin import collected_script, explained_script
from ort_zero.runtimes import registry

_ACCELERATES_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_HOOKED_MODULE = "deepspeed.runtime.engine"
_state: dict[str, Any] = {"armed": False, "auto_error": None, "bare": False}
"""Whether the import hooks are armed; why the plugin could not be enabled; whether to prepare bare ORTModules."""


registry.after_step.append(explained_script.end_if_asked)


class _WaitForImports:
    """A finder that arms wrapt's hooks when the import of a package begins: an earlier import of wrapt is too slow."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Arm the hooks of DeepSpeed or ONNX Runtime's training part at its first import; find no module."""
        if name in _HOOKS:
            _arm(name)


def autoload() -> None:
    """Arm the hooks that enable ort_zero when DeepSpeed's engine or ORTModule is imported. Never raises.

    Called by torch through the entry point ``torch.backends``; an exception here would break ``import torch``.
    """
    try:
        if env.disabled() or _state["armed"]:
            return
        _state["armed"] = _state["bare"] = True
        if os.environ.get(_ACCELERATES_CONFIG, "none") != "none":
            atexit.register(_warn_of_unused_section)
        collected_script.arm()
        sys.meta_path.insert(0, _WaitForImports)  # type: ignore[arg-type]
        for name in tuple(_HOOKS):
            if name in sys.modules:
                _arm(name)
    except Exception as error:
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _warn_of_unused_section() -> None:
    """Warn at exit of a section in accelerate's file that no engine has read: ``Accelerator(cpu=True)`` makes none."""
    path = os.environ[_ACCELERATES_CONFIG]
    with contextlib.suppress(Exception):  # accelerate itself tells of a wrong file
        if not registry.engines_made and json.loads(open(path).read())["ort_zero"].get("enabled", True):
            from ort_zero.log import get_logger

            get_logger().warning(
                'nothing has read the section "ort_zero" of %s: the script made no DeepSpeed engine. Leave '
                "Accelerator(cpu=True) out, which leaves DeepSpeed out; DeepSpeed takes the CPU by itself", path,
            )  # fmt: skip


def _ortmodule_hooks() -> dict[str, Callable[[Any], None]]:
    """Return the backend's hooks by the name of the imported module."""
    from ort_zero.ortmodule.backend import import_hooks

    return {name: functools.partial(_run_hook, hook) for name, hook in import_hooks().items()}


_HOOKS: dict[str, Callable[[], dict[str, Callable[[Any], None]]]] = {
    "deepspeed": lambda: {_HOOKED_MODULE: _enable_quietly},
    "onnxruntime.training": _ortmodule_hooks,
}
"""The hooks of packages whose hooks are not armed yet, by package and module."""


def _arm(package: str) -> None:
    """Register the hooks of a package to be called after the import of their modules, at once for imported ones."""
    try:
        hooks = _HOOKS.pop(package)()
        if not _HOOKS and _WaitForImports in sys.meta_path:
            sys.meta_path.remove(_WaitForImports)  # type: ignore[arg-type]
        from wrapt.importer import register_post_import_hook

        for name, hook in hooks.items():
            register_post_import_hook(hook, name)
    except Exception as error:  # raised here, the error would end the user's import
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _run_hook(hook: Callable[[Any], None], module: Any) -> None:
    """Run a backend's hook after the import of `module`, unless bare ORTModules should stay unchanged; log errors."""
    if not _state["bare"]:
        return
    try:
        hook(module)
    except Exception as error:
        _state["auto_error"] = str(error)
        from ort_zero.log import get_logger

        get_logger().warning("ORTModule is left as it is: %s", error)


def _enable_quietly(module: Any) -> None:
    """Enable the plugin; on failure warn once and keep the reason for :func:`status`.

    An engine whose config has an enabled section then raises the reason: it must not train in PyTorch unnoticed.
    """
    try:
        enable()
    except Exception as error:
        _state["auto_error"] = str(error)
        from ort_zero.log import get_logger

        get_logger().warning("not enabled, DeepSpeed is left as it is: %s", error)
        try:
            from ort_zero.plugin.refused_section import patch

            reason = str(error)
            registry.apply("refused_section", lambda: (patch(reason),))
        except Exception:  # the engine cannot be patched either: only the warning remains
            get_logger().debug("an enabled section will not be refused", exc_info=True)


def enable() -> None:
    """Patch DeepSpeed, all or nothing, and prepare the bare ORTModule; a second call does nothing.

    With ``ORT_ZERO_DISABLE=1`` nothing happens. If DeepSpeed is not installed, but ONNX Runtime is, only ORTModule is
    prepared; the compile backend needs no preparation.

    Raises:
        UnsupportedVersionError: DeepSpeed is missing or out of range.
        PatchError: an engine exists already, DeepSpeed's code has an unknown shape, or another library patched it.
    """
    if env.disabled() or _engine_is_patched():
        return
    from ort_zero.compat import torch_extensions, versions

    registry.restore("refused_section")
    _enable_ortmodule()
    if versions.installed("deepspeed") is None and versions.installed("onnxruntime") is not None:
        return
    versions.say_untested(versions.require("zero"))
    _refuse_late()
    torch_extensions.prepare()
    importlib.import_module(_HOOKED_MODULE)
    if _engine_is_patched():
        return  # the armed import hook has just called this function
    from ort_zero.distributed import gloo_exit
    from ort_zero.errors import PatchError
    from ort_zero.plugin import engine_patch, fp32_patch
    from ort_zero.plugin.zero3_hooks import patches as hook_patches

    registry.apply("deepspeed", lambda: (*engine_patch.PATCHES, *hook_patches.PATCHES))
    if collected_script.request() is not None:
        registry.apply("changed config", collected_script.patches)
    # another torch or DeepSpeed: they say less, and zero_to_fp32 does not read sharded checkpoints of ours
    for name, patches in (("compiled operators", torch_extensions.patches), ("fp32 state", lambda: fp32_patch.PATCHES)):
        with contextlib.suppress(PatchError):
            registry.apply(name, patches)
    _state["auto_error"] = None
    gloo_exit.settle_at_exit()


def _enable_ortmodule() -> None:
    """Prepare the bare ORTModule, whether its package has been imported, is being imported, or will be."""
    _state["bare"] = True
    if "onnxruntime.training" in _HOOKS:
        if "onnxruntime.training" in sys.modules:
            _arm("onnxruntime.training")
        elif _WaitForImports not in sys.meta_path:
            sys.meta_path.insert(0, _WaitForImports)  # type: ignore[arg-type]
    else:
        for name, hook in _ortmodule_hooks().items():
            if name in sys.modules:
                hook(sys.modules[name])


def disable() -> None:
    """Restore the original objects of DeepSpeed and ONNX Runtime.

    Existing engines keep their hooks. Models in PyTorch run on; models in ONNX Runtime cannot be called any more.

    Raises:
        PatchError: another library patched a target after ort_zero; nothing is changed then.
    """
    registry.restore(*reversed(registry.patch_sets))
    _state["bare"] = False


def is_enabled() -> bool:
    """Return True while DeepSpeed's engine or the constructor of ORTModule is patched."""
    return _engine_is_patched() or "ORTModule" in registry.patch_sets


def _engine_is_patched() -> bool:
    return "deepspeed" in registry.patch_sets


def status() -> dict[str, Any]:
    """Return the patches, the models with their graphs, and the reasons, as plain values.

    Keys: ``enabled``, ``reason`` (why the plugin is not enabled, or None), ``patches`` (targets), ``cpu_memory`` (the
    measures of this name that are in effect), ``models`` and ``fallbacks`` (sum over the models). ``models`` has one
    entry for each living engine whose section asks for ONNX Runtime, the newest one last: ``backend``
    (``"onnxruntime"``, ``"torch"`` or ``"not called yet"``), graphs, runs, transitions and fallback reason. The
    newest model's entry stays once the model is freed or its engine destroyed, with ``gone`` True, until another model
    is made; the model's memory does not.
    """
    from ort_zero.cpu_memory import measures

    models = registry.statuses()
    reason = "ORT_ZERO_DISABLE is set" if env.disabled() else _state["auto_error"]
    return {
        "enabled": is_enabled(),
        "reason": reason,
        "patches": [target for patch_set in registry.patch_sets.values() for target in patch_set.targets()],
        "models": models,
        "cpu_memory": measures.in_effect(),
        "fallbacks": sum(model["fallbacks"] for model in models),
    }


def _refuse_late() -> None:
    """Raise PatchError if a DeepSpeed engine exists already: it has DeepSpeed's hooks and would be half patched."""
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
