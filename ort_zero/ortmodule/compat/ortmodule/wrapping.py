"""Makes an ORTModule of a user's module, with ORTModule's own policies switched off, and gives it its runner."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

from ort_zero import env, log
from ort_zero.compat import third_party
from ort_zero.ortmodule.compat.ortmodule.loading import import_ortmodule
from ort_zero.ortmodule.compat.ortmodule.manager import Manager
from ort_zero.ortmodule.compat.ortmodule.runner import ModelRunner, set_runner
from ort_zero.ortmodule.compat.ortmodule.views import TransitionsView
from ort_zero.ortmodule.compat.ortmodule.wrapper_class import COPIED, PICKLES_ITSELF, wrapper_class

_WITHOUT_EFFECT = {
    "ORTMODULE_LOG_LEVEL": log.VARIABLE,
    "ORTMODULE_MEMORY_OPT_LEVEL": "ort_zero.memory.recompute and .level",
    "ORTMODULE_MEMORY_OPT_CONFIG": "ort_zero.memory.recompute",
}
"""Variables that ORTModule alone would read, and what takes their place."""
_SKIP_CHECKS = "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT", "SKIP_CHECK_DEVICE"


_making: list[None] = []


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Let ORTModules that are constructed in the block be initialized by upstream's code alone."""
    _making.append(None)
    try:
        yield
    finally:
        _making.pop()


def is_making() -> bool:
    """Return whether a block of :func:`making` runs."""
    return bool(_making)


def make_ortmodule(module: Any, *, save_onnx: str | None = None, level: log.Level | None = None) -> Any:
    """Return `module` wrapped in an ORTModule whose policies are ours.

    ORT's own checks and its own fallback are off: the runner looks at every call, and knows of the other ranks.

    Args:
        module: the user's.
        save_onnx: folder for its graphs; rank 0 writes them.
        level: log level of what ORTModule and ONNX Runtime print; None is the default one.
    """
    level = level or log.chosen(log.DEFAULT)
    _warn_of_variables()
    package = import_ortmodule()
    wrapped = _wrapped(package, module, level, save_onnx if env.rank() == 0 else None)
    for manager in managers_of(wrapped):
        manager._ort_zero_level = level
        _set_runtime_options(manager._runtime_options)
    return wrapped


def _warn_of_variables() -> None:
    for variable, ours in _WITHOUT_EFFECT.items():
        if os.environ.get(variable):
            log.get_logger().warning("%s has no effect under ort_zero: set %s", variable, ours)


def _wrapped(package: Any, module: Any, level: log.Level, save_onnx: str | None) -> Any:
    """Return the ORTModule of `module`, which prints as `level` says and writes its graphs into `save_onnx`."""
    from onnxruntime.training.ortmodule import _logger
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy
    from onnxruntime.training.ortmodule.options import _LoggingOptions

    if save_onnx is not None:
        os.makedirs(save_onnx, exist_ok=True)
    wanted = package.LogLevel[level.ortmodule]
    with _without_own_level():
        logging_options = _LoggingOptions(wanted)
        options = package.DebugOptions(
            # each method of a model that a wrapper has as well is reported; DeepSpeed's engine calls none of them
            log_level=package.LogLevel.ERROR if level.exporter == "held" else wanted,
            save_onnx=save_onnx is not None,
            onnx_prefix="model" if save_onnx is not None else "",
            save_path=save_onnx or "",
        )
    previous, package.ORTMODULE_FALLBACK_POLICY = package.ORTMODULE_FALLBACK_POLICY, _FallbackPolicy.FALLBACK_DISABLE
    try:
        modes = [(part, part.training) for part in module.modules()]
        # it looks at every attribute of the module, also at those that are deprecated
        with third_party.quiet(), making():
            wrapped = wrapper_class(package.ORTModule, type(module))(module, options)
        for part, training in modes:
            part.training = training  # upstream puts all of them into the mode of the whole
    finally:
        package.ORTMODULE_FALLBACK_POLICY = previous
    options.log_level, options._logging = wanted, logging_options
    _logger.configure_ortmodule_logger(wanted)
    return wrapped


@contextlib.contextmanager
def _without_own_level() -> Iterator[None]:
    """Keep ORTModule in the block from reading a level of its own, which would part from the other three."""
    value = os.environ.pop("ORTMODULE_LOG_LEVEL", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["ORTMODULE_LOG_LEVEL"] = value


def _set_runtime_options(options: Any) -> None:
    from onnxruntime.training.ortmodule.options import _SkipCheck

    options.skip_check = functools.reduce(operator.or_, (getattr(_SkipCheck, name) for name in _SKIP_CHECKS))
    leave_out(options)


def leave_out(options: Any) -> None:
    """Switch off in the runtime options of a manager what is not taken over from upstream."""
    options.enable_zero_stage3_support = False
    # it moves a Slice over nodes that lack the axis
    options.enable_compute_optimizer = False
    # without that one, these put nodes into the graph that print the share of padding at each step
    options.enable_embedding_sparse_optimizer = False
    options.enable_label_sparse_optimizer = False


def manager_by_mode(module: Any) -> bool:
    """Return whether upstream would have its manager for training do a call of the user's module now."""
    import torch

    return module.training and torch.is_grad_enabled()


def managers_of(ortmodule: Any) -> tuple[Any, Any]:
    """Return the (training, inference) managers of an ORTModule."""
    factory = ortmodule._torch_module._execution_manager
    return factory(True), factory(False)


def attach(
    ortmodule: Any, runner: ModelRunner, wrap_copy: Callable[[Any], Any], *, pickles_itself: bool = False
) -> None:
    """Give both managers of an ORTModule their runner.

    Args:
        ortmodule: from :func:`make_ortmodule`.
        runner: does its calls.
        wrap_copy: returns the wrapper of a copy of the user's module, for ``copy.deepcopy``.
        pickles_itself: a pickle of the ORTModule brings an ORTModule back, made by `wrap_copy`, not the user's module.
    """
    vars(ortmodule).update({COPIED: wrap_copy, PICKLES_ITSELF: pickles_itself})
    managers = managers_of(ortmodule)
    views = {view.training: view for view in map(Manager, managers)}
    for manager in managers:
        set_runner(manager, runner)
        # upstream chooses by the mode of the module; the runner also looks at what requires grad
        manager._ort_zero_views = views
        view = views[Manager.wants_gradients(manager)]
        manager._graph_transition_manager = TransitionsView(view, functools.partial(runner.current, view.training))
