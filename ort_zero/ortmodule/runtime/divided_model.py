"""Runs a model whose own forward no graph can hold: PyTorch runs that code, ONNX Runtime the submodules it calls.

:class:`ort_zero.ortmodule.runtime.runtime.Runtime` begins with it when its graph has failed, see
:mod:`ort_zero.ortmodule.runtime.submodule_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError
from ort_zero.log import chosen, get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.submodule_graphs import Part, SubmoduleGraphs, callable_parts
from ort_zero.statistics.collect.subscribed_model import subscribed_models_in


class DividedRuntime(Protocol):
    """The runtime of a model that is divided."""

    module: torch.nn.Module
    config: OrtModuleConfig
    excluded: ExcludedModules
    submodule_graphs: SubmoduleGraphs | None

    @property
    def is_part(self) -> bool:
        """Whether the module is a submodule of a model that is divided itself."""

    def runtime_of_part(self, module: torch.nn.Module, config: OrtModuleConfig) -> Any:
        """Return the runtime of a submodule."""

    def has_run(self) -> bool:
        """Return whether ONNX Runtime has run the module, or a part of it."""

    def forget_step(self) -> None:
        """Let PyTorch begin the step of the subscribers anew."""

    def announce_gradients(self) -> None:
        """Announce what runs, if it has run with gradients."""


def divide(runtime: DividedRuntime, error: BaseException, run_in_torch: Callable[[], Any]) -> Any:
    """Run the module's own code in PyTorch from this call on, its submodules in graphs of their own.

    Args:
        runtime: of the module.
        error: the reason.
        run_in_torch: runs this call.

    Raises:
        ExportError: nothing of it runs in ONNX Runtime then, and it is a whole model.
    """
    reason = _why(str(error))
    runtime.excluded.forget_learned()

    def make(module: torch.nn.Module, path: str) -> tuple[Part, Callable]:
        return _part(runtime, module, path)

    runtime.submodule_graphs = SubmoduleGraphs(runtime.module, reason, lambda: runtime.excluded.reasons, make)
    runtime.forget_step()
    name = type(runtime.module).__name__
    if callable_parts(runtime.module, runtime.excluded.reasons):
        log = get_logger().info if runtime.is_part else get_logger().warning
        log("the forward of %s runs in PyTorch, its submodules in graphs of their own: %s", name, reason)
    else:
        get_logger().info("%s runs in PyTorch: %s", name, reason)
    result = run_divided(runtime, runtime.submodule_graphs, run_in_torch)
    if not runtime.is_part and not runtime.has_run():
        runtime.submodule_graphs = None
        if not (isinstance(error, ExportError) and error.can_be_excluded):
            raise error
        runtime.excluded.divisible = lambda module: ()  # the next call has a graph around that submodule
    return result


def run_divided(runtime: DividedRuntime, graphs: SubmoduleGraphs, run_in_torch: Callable[[], Any]) -> Any:
    """Run the module's own code in PyTorch, and in ONNX Runtime the submodules that it calls."""
    if any(one.acts_on_tensors() for model in subscribed_models_in(runtime.module) for one in model.active):
        return run_in_torch()  # their hooks are on the modules of PyTorch
    with graphs.called():
        result = run_in_torch()
    runtime.announce_gradients()
    return result


def _part(runtime: DividedRuntime, module: torch.nn.Module, path: str) -> tuple[Part, Callable]:
    """Return the runtime of a submodule, and what calls it in ONNX Runtime."""
    config = runtime.config
    folder = str(Path(config.save_onnx) / path) if config.save_onnx is not None else None
    section = config.model_copy(update={"exclude": [], "save_onnx": folder})
    wrapped = ort_compat.make_ortmodule(module, save_onnx=folder, level=chosen(section.log_level))
    part = runtime.runtime_of_part(module, section)
    inside = f"{path}."
    for excluded, why in runtime.excluded.reasons.items():
        if excluded.startswith(inside):
            part.excluded.reasons[excluded.removeprefix(inside)] = why
    ort_compat.attach(wrapped, part, lambda copy: copy)
    return part, wrapped


def _why(reason: str) -> str:
    """Return the reason in an error's text, without the ways out, which are not needed."""
    for end in (", which a graph cannot hold; move that code", ". Run the model in PyTorch with"):
        reason = reason.partition(end)[0]
    return reason.partition(" cannot run in ONNX Runtime: ")[2] or reason
