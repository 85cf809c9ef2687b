"""Names parts of a step for torch.profiler, while ``ort-zero profile`` measures a script; costs nothing otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PREFIX = "ort_zero::"
STEP, FORWARD, BACKWARD, OPTIMIZER = "step", "forward", "backward", "optimizer"
SESSION, GATHER, REDUCE, IN_PYTORCH = "session", "gather", "reduce", "in PyTorch"
"""Names of the parts: of a step by the engine or the program, of a graph's run, and of what its nodes do."""

_active = False


def activate(active: bool) -> None:
    """Let ranges be recorded from now on, or not."""
    global _active
    _active = active


class named_range:
    """Records what runs in the block as a range of torch.profiler if somebody has asked for that; also a decorator.

    Args:
        name: one of the names above.
    """

    __slots__ = ("_name", "_record")

    def __init__(self, name: str):
        self._name = name
        self._record: Any = None

    def __enter__(self) -> None:
        if _active:
            import torch

            self._record = torch.profiler.record_function(PREFIX + self._name)
            self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._record is not None:
            record, self._record = self._record, None
            record.__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with each of its calls in such a block."""

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            if not _active:
                return function(*args, **kwargs)
            with named_range(self._name):
                return function(*args, **kwargs)

        return named
