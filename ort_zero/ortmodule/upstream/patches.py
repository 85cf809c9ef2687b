"""The patches with which upstream's own ORTModule runs on today's torch; its behaviour stays upstream's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ort_zero import env, log
from ort_zero.ortmodule.upstream import PACKAGE, extensions
from ort_zero.utils.patching import Patch, defined_in, replaced

RANGES = "onnxruntime.training.utils.torch_profile_utils"
_NO_EXTENSIONS = "extensions were not detected"
"""Words of the error that ORTModule's package keeps if its own folder has no compiled extension."""


def range_patches() -> Iterator[Patch]:
    """Yield the patches of upstream's profiling ranges, which need CUDA; none where torch has CUDA."""
    if torch.cuda.is_available():
        return

    def without_nvtx(original: Callable) -> Callable:
        return functools.wraps(original)(lambda *args: None)

    for way in ("push", "pop"):
        yield _patch(f"{RANGES}:torch_nvtx_range_{way}", without_nvtx, "profiling ranges on a torch without NVTX")


def ortmodule_patches() -> Iterator[Patch]:
    """Yield the patches of ORTModule's package, whose last module has been imported."""
    yield Patch(
        target=f"{PACKAGE}:_FALLBACK_INIT_EXCEPTION",
        build=lambda error: None if _NO_EXTENSIONS in str(error) else error,
        why="the C++ extensions are in the user's cache",
    )
    yield _patch(f"{PACKAGE}.ortmodule:ORTModule.__init__", _constructor, "the C++ extensions; one line for the user")
    exporting = f"{PACKAGE}._graph_transition_manager:GraphTransitionManager._get_exported_model"
    yield _patch(exporting, _torchscript_export, "upstream exports with TorchScript, which is no longer the default")
    options = f"{PACKAGE}._graph_execution_manager:GraphExecutionManager._get_session_config"
    yield _patch(options, _threads_of_rank, "a rank's share of the cores, where ONNX Runtime takes all cores")


def make_ortmodule(module: torch.nn.Module, debug_options: Any = None) -> Any:
    """Return upstream's ORTModule around `module` for an engine, without the line for users of a bare ORTModule.

    :func:`ort_zero.ortmodule.upstream.loading.import_ortmodule` must have been called.
    """
    from onnxruntime.training.ortmodule import ORTModule

    wrapper = ORTModule.__new__(ORTModule)
    inspect.unwrap(ORTModule.__init__)(wrapper, module, debug_options)
    return wrapper


def _patch(target: str, build: Callable, why: str) -> Patch:
    return Patch(target=target, build=build, why=why, guard=defined_in(target.partition(":")[0]))


def _constructor(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        extensions.load()
        _say_what_is_not_checked()
        original(self, *args, **kwargs)

    return __init__


@functools.cache
def _say_what_is_not_checked() -> None:
    """Warn once, on rank 0, of what upstream's ORTModule does not notice."""
    if env.rank() == 0:
        log.get_logger().warning(
            "ORTModule(model) is onnxruntime-training's own: what Python code decides while the model is traced "
            "(branches, attributes, random choices) is baked into the graph, unchecked; "
            'ort_zero.wrap(model, backend="ortmodule") checks'
        )


def _torchscript_export(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_exported_model(*args: Any, **kwargs: Any) -> Any:
        with replaced(torch.onnx, "export", _with_torchscript):
            return original(*args, **kwargs)

    return _get_exported_model


def _with_torchscript(export: Callable) -> Callable:
    """Return ``torch.onnx.export`` with the TorchScript exporter as default; torch 2.4 has no other exporter."""
    parameters = inspect.signature(export).parameters
    # a program may have put a function of its own in the place of torch's, which takes whatever it is given
    if "dynamo" not in parameters and all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return export
    return functools.wraps(export)(functools.partial(export, dynamo=False))


def _threads_of_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_session_config(self: Any) -> Any:
        options, providers, provider_options = original(self)
        options.intra_op_num_threads = options.intra_op_num_threads or env.threads_per_rank()
        options.inter_op_num_threads = options.inter_op_num_threads or 1
        return options, providers, provider_options

    return _get_session_config
