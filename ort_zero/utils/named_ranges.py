"""Name parts of a step for torch.profiler while ``ort-zero profile`` measures a script; without cost otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PREFIX = "ort_zero::"
STEP, FORWARD, BACKWARD, OPTIMIZER = "step", "forward", "backward", "optimizer"
SESSION, GATHER, REDUCE = "segment", "gather", "reduce"
"""Names of the ranges: parts of a step, and the run of a segment, whose name goes on with a space and its key."""

_active = False


def activate(active: bool) -> None:
    """Switch the recording of ranges on or off."""
    global _active
    _active = active


class named_range:
    """A context manager and decorator that records its block as a range of torch.profiler, if recording is on."""

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
        """Return a function that calls `function` and records each call as a range."""

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            if not _active:
                return function(*args, **kwargs)
            with named_range(self._name):
                return function(*args, **kwargs)

        return named
