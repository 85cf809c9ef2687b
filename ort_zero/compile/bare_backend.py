"""Compile what a script compiles itself: ``torch.compile(model, backend="ort_zero")``.

Whatever needs onnx and onnxruntime is imported after the check of their versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule

from ort_zero.backends import registry
from ort_zero.compat import versions

if TYPE_CHECKING:
    from ort_zero.compile.records import ModelRecord
    from ort_zero.units.running_model import UnitsModel


def ort_zero(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the backend that ``torch.compile`` finds under the names ort_zero and onnxrt.

    Args:
        module: the graph.
        example_inputs: its inputs.
        options: see :class:`~ort_zero.compile.settings.Settings`.

    Raises:
        ConfigError: an unknown option or value.
        UnsupportedVersionError: torch, onnx or onnxruntime is missing or out of range.
    """
    if not _bare:
        versions.say_untested(versions.require("compile"))
    from ort_zero.compile.dynamo_backend import Compiler
    from ort_zero.compile.settings import from_options

    return Compiler(from_options(options), bare_record())(module, example_inputs)


class TorchCompile(nn.Module):
    """Stands for all functions that the script compiles by ``torch.compile``."""


_bare: list[tuple[ModelRecord, TorchCompile, UnitsModel]] = []


def bare_record() -> ModelRecord:
    """Return the record of what the script itself compiles; ``ort_zero.status()`` shows it from the first graph on."""
    from ort_zero.compile.engine import CompileEngine
    from ort_zero.compile.settings import Settings
    from ort_zero.units.running_model import UnitsModel

    if not _bare:
        module, engine = TorchCompile(), CompileEngine(Settings())
        _bare.append((engine.record, module, UnitsModel(module, engine, (), 0, False)))
        registry.register(_bare[0][2])
    return _bare[0][0]
