"""Names parts of a step for torch.profiler, while ``ort-zero profile`` measures a script; costs nothing otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

PREFIX = "ort_zero::"
STEP, FORWARD, BACKWARD, OPTIMIZER = "step", "forward", "backward", "optimizer"
SESSION, GATHER, REDUCE, IN_PYTORCH = "session", "gather", "reduce", "in PyTorch"
"""Names of the parts: of a step by the engine or the program, of a graph's run, and of what its nodes do."""

_active = False


def activate(active: bool) -> None:
    """Let ranges be recorded from now on, or not."""
    global _active
    _active = active


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Record what runs in the block as a range of torch.profiler if somebody has asked for that; also a decorator."""
    if not _active:
        yield
        return
    import torch

    with torch.profiler.record_function(PREFIX + name):
        yield
