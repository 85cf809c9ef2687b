"""ORTModule as its own users write it, without DeepSpeed: its constructor, the switches that they set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ort_zero import log
from ort_zero.compat import third_party
from ort_zero.ortmodule.compat import extensions
from ort_zero.ortmodule.compat.ortmodule.loading import PACKAGE, import_ortmodule
from ort_zero.ortmodule.compat.ortmodule.wrapper_class import wrapper_class
from ort_zero.ortmodule.compat.ortmodule.wrapping import is_making, leave_out, making, managers_of
from ort_zero.utils.patching import Patch, defined_in

_LEVELS = {"VERBOSE": "DEBUG", "FATAL": "ERROR"}
"""Names of upstream's levels that ours has another name for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptions:
    """What the ``DebugOptions`` and the ``ORTMODULE_*`` variables of a user ask for."""

    level: str
    """Name of our level."""
    cache_dir: str | None
    """Folder of the export cache."""
    recompute_level: int
    """``ORTMODULE_MEMORY_OPT_LEVEL``: 0, 1 or 2."""
    recompute_plan: str
    """``ORTMODULE_MEMORY_OPT_CONFIG``: a file with a plan; empty for none."""
    keeps_checkpointing: bool
    """``ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT``: the recomputation does not replace torch's activation checkpointing."""


def constructor_patch(make: Callable[[Any, Any, Any], None]) -> Patch:
    """Return the patch with which the constructor ``ORTModule(module, debug_options)`` of a user calls `make`.

    Args:
        make: gets the new object, the user's module and the DebugOptions (None for the default ones).
    """

    def build(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(self, module, debug_options=None):
            if is_making():
                original(self, module, debug_options)
            else:
                make(self, module, debug_options)

        return __init__

    return Patch(
        target=f"{PACKAGE}.ortmodule:ORTModule.__init__",
        build=build,
        why="ORTModule(model) works on today's torch",
        guard=defined_in(f"{PACKAGE}.ortmodule"),
    )


def extensions_patch() -> Patch:
    """Return the patch that tells whoever asks where the compiled C++ extensions are: in our cache."""
    return Patch(
        target=f"{PACKAGE}:ORTMODULE_TORCH_CPP_DIR",
        build=lambda _: str(extensions.extension_dir()),
        why="where the C++ extensions are",
    )


def construct(wrapper: Any, module: Any, debug_options: Any) -> UserOptions | None:
    """Initialize a new ORTModule as its user asks; return the switches, or None if PyTorch runs the module.

    Args:
        wrapper: object of upstream's class or of a user's class below it, whose constructor runs.
        module: the user's.
        debug_options: DebugOptions; None for the default ones.

    Raises:
        ORTModuleFallbackException: upstream's, if its policy does not let PyTorch run what cannot be wrapped.
    """
    package = import_ortmodule()
    object.__setattr__(wrapper, "__class__", wrapper_class(package.ORTModule, type(module), type(wrapper)))
    modes = [(part, part.training) for part in module.modules()] if hasattr(module, "modules") else []
    with making(), third_party.quiet():
        package.ORTModule.__init__(wrapper, module, debug_options)
    for part, training in modes:
        part.training = training  # upstream puts all of them into the mode of the whole
    if not hasattr(wrapper._torch_module, "_execution_manager"):
        return None
    options = managers_of(wrapper)[0]._runtime_options
    name = managers_of(wrapper)[0]._debug_options.logging.log_level.name
    level = log.chosen(_LEVELS.get(name, name))
    for manager in managers_of(wrapper):
        manager._ort_zero_level, manager._ort_zero_is_users = level, True
        leave_out(manager._runtime_options)
    return UserOptions(
        level=level.name,
        cache_dir=options.ortmodule_cache_dir or None,
        recompute_level=options.memory_optimization_level,
        recompute_plan=options.memory_optimizer_config_file_path,
        keeps_checkpointing=package._defined_from_envvar("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", 0) == 1,
    )


def debug_options_of(wrapper: Any) -> Any:
    """Return the DebugOptions of an ORTModule."""
    return managers_of(wrapper)[0]._debug_options


def run_in_torch_from_now_on(wrapper: Any, module: Any) -> None:
    """Let an ORTModule hand its calls to `module`, which calls ONNX Runtime itself or does without."""
    from onnxruntime.training.ortmodule import _utils

    _utils.switch_backend_to_pytorch(wrapper, module)
