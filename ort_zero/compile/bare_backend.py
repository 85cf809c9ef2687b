"""Compile what a script compiles itself: ``torch.compile(model, backend="ort_zero")``.

Whatever needs onnx and onnxruntime is imported after the check of their versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ort_zero.compat import versions
from ort_zero.runtimes import registry


def ort_zero(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the backend that ``torch.compile`` finds under the names ort_zero and onnxrt.

    Raises:
        ConfigError: an unknown option or value.
        UnsupportedVersionError: torch, onnx or onnxruntime is missing or out of range.
    """
    from ort_zero.compile.settings import from_options

    settings = from_options(options)
    _, running = _compiled_by_script()
    compiler = running.engine.compiler(runner=settings.first_runner)
    compiler.settings = settings
    return compiler(module, example_inputs)


class TorchCompile(nn.Module):
    """Stands in ``ort_zero.status()`` for all functions that the script compiles by ``torch.compile``."""


@functools.cache
def _compiled_by_script() -> tuple[TorchCompile, Any]:
    """Return what stands for the script's own compilations; ``ort_zero.status()`` shows it from the first graph on."""
    versions.say_untested(versions.require("compile"))
    from ort_zero.compile.engine import CompileEngine
    from ort_zero.compile.settings import Settings
    from ort_zero.units.running_model import UnitsModel

    module = TorchCompile()
    running = UnitsModel(module, CompileEngine(Settings()), (), 0, False)
    registry.register(running)
    return module, running
