"""Calls that ``torch.compile`` leaves alone: what runs in ONNX Runtime is compiled already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def not_compiled(function: Callable) -> Callable:
    """Return `function` so that a compiled program calls it as it is, without looking into it.

    ``torch.compiler.disable`` does that too, but imports the compiler: seconds that most programs need not spend. So
    this asks for it only in a process that compiles, and looks for that at each call.
    """
    disabled: list[Callable] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo.eval_frame" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(_disabled(function))
        return disabled[0](*args, **kwargs)

    return call


def _disabled(function: Callable) -> Callable:
    import torch

    return torch.compiler.disable(function)
