"""Switches the plugin on and off, and says what it does.

Nothing heavy is imported at module level: :func:`autoload` runs at the end of every ``import torch``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ort_zero import env
from ort_zero.backends import loading, registry

if TYPE_CHECKING:
    from ort_zero.backends.interface import RunningModel
    from ort_zero.config import Config

_HOOKED_MODULE = "deepspeed.runtime.engine"
_state: dict[str, Any] = {"armed": False, "auto_error": None, "bare": False}
"""Whether the hooks are armed; why the plugin could not be enabled; whether bare ORTModules are to work."""


class _WaitForImports:
    """Arms wrapt's hooks when a package begins to be imported: wrapt alone takes longer to import than we may."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing; at the first sight of DeepSpeed or ONNX Runtime's training part arm its hooks."""
        arm = _HOOKS.get(name)
        if arm is not None:
            arm()


def autoload() -> None:
    """Arm the hooks that enable ort_zero when DeepSpeed's engine or ORTModule is imported. Never raises.

    Called by torch through the entry point ``torch.backends``; an exception here would break ``import torch``.
    """
    try:
        if env.disabled() or _state["armed"]:
            return
        _state["armed"] = _state["bare"] = True
        sys.meta_path.insert(0, _WaitForImports)  # type: ignore[arg-type]
        for name, arm in tuple(_HOOKS.items()):
            if name in sys.modules:
                arm()
    except Exception as error:
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _arm_deepspeed() -> None:
    _arm("deepspeed", {_HOOKED_MODULE: _enable_quietly})


def _arm_ortmodule() -> None:
    hooks = _backend_hooks()
    _arm("onnxruntime.training", {name: functools.partial(_run_hook, hook) for name, hook in hooks.items()})


def _backend_hooks() -> dict[str, Callable[[Any], None]]:
    """Return the backend's hooks by the name of the imported module; none where the backend cannot be loaded."""
    try:
        return loading.load().import_hooks(_model_is_made)
    except Exception as error:  # raised here, the error would end the user's import of onnxruntime
        _state["auto_error"] = f"{type(error).__name__}: {error}"
        return {}


_HOOKS = {"deepspeed": _arm_deepspeed, "onnxruntime.training": _arm_ortmodule}
"""The function that arms the hooks of a package, by its name; each is called once."""


def _arm(package: str, hooks: Mapping[str, Callable[[Any], None]]) -> None:
    """Let each function be called when its module has been imported, or now if it has been."""
    _HOOKS.pop(package, None)
    if not _HOOKS and _WaitForImports in sys.meta_path:
        sys.meta_path.remove(_WaitForImports)  # type: ignore[arg-type]
    try:
        from wrapt.importer import register_post_import_hook

        for name, hook in hooks.items():
            register_post_import_hook(hook, name)
    except Exception as error:
        _state["auto_error"] = f"{type(error).__name__}: {error}"


def _model_is_made(running: RunningModel, section: Config) -> None:
    """Report on a model that a user's own code made an ORTModule of."""
    from ort_zero.plugin import wrap

    wrap.report_on(running, section)


def _run_hook(hook: Callable[[Any], None], module: Any) -> None:
    """Run a backend's hook after the import of `module`, unless bare ORTModules are to stay as they are.

    A failure is no reason for the import to fail in another way than without the plugin.
    """
    if not _state["bare"]:
        return
    try:
        hook(module)
    except Exception as error:
        _state["auto_error"] = str(error)
        from ort_zero.log import get_logger

        get_logger().warning("ORTModule is left as it is: %s", error)


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
    """Patch DeepSpeed, all or nothing, and let the bare ORTModule work; a second call does nothing.

    ``ORT_ZERO_DISABLE=1`` makes it do nothing. Where DeepSpeed is not installed, but onnxruntime-training is, only
    ORTModule is prepared.

    Raises:
        UnsupportedVersionError: DeepSpeed is missing or out of range.
        PatchError: an engine exists already, DeepSpeed's code has an unknown shape, or another library patched it.
    """
    if env.disabled() or _engine_is_patched():
        return
    from ort_zero.compat import submodules, torch_extensions, versions

    registry.restore("refused_section")
    _enable_ortmodule()
    if versions.installed("deepspeed") is None and versions.installed("onnxruntime-training") is not None:
        return
    versions.say_untested(versions.require("zero"))
    _refuse_late()
    torch_extensions.prepare()
    importlib.import_module(_HOOKED_MODULE)
    submodules.attach_submodules("deepspeed")
    if _engine_is_patched():
        return  # the armed hook has just done it
    from ort_zero.distributed import gloo_exit
    from ort_zero.plugin import engine_patch, fp32_patch
    from ort_zero.utils.patching import PatchSet
    from ort_zero.zero3_hooks import patches as hook_patches

    wanted = PatchSet("deepspeed", (*engine_patch.PATCHES, *hook_patches.patches(), *fp32_patch.patches()))
    wanted.apply()
    registry.patch_sets["deepspeed"] = wanted
    _state["auto_error"] = None
    gloo_exit.settle_at_exit()


def _enable_ortmodule() -> None:
    """Let the bare ORTModule work, whether its package has been imported, is being imported, or will be."""
    _state["bare"] = True
    if "onnxruntime.training" in _HOOKS:
        if "onnxruntime.training" in sys.modules:
            _arm_ortmodule()
        elif _WaitForImports not in sys.meta_path:
            sys.meta_path.insert(0, _WaitForImports)  # type: ignore[arg-type]
    else:
        for name, hook in _backend_hooks().items():
            if name in sys.modules:
                _run_hook(hook, sys.modules[name])


def disable() -> None:
    """Put back the very objects that were there.

    Engines that exist keep the hooks that they have, and run on where PyTorch runs the model; a model in ONNX Runtime
    cannot be called any more.

    Raises:
        PatchError: somebody patched one of our targets after us; nothing is changed then.
    """
    was_enabled = is_enabled()
    registry.restore(*reversed(registry.patch_sets))
    _state["bare"] = False
    if was_enabled:
        from ort_zero.compat import third_party

        third_party.unsilence()


def is_enabled() -> bool:
    """Return True while DeepSpeed's engine or the constructor of ORTModule is patched."""
    return _engine_is_patched() or "ORTModule" in registry.patch_sets


def _engine_is_patched() -> bool:
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
