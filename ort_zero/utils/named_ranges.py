"""Name parts of a step for torch.profiler while ``ort-zero profile`` measures a script; without cost otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "ort_zero::"
STEP, FORWARD, BACKWARD, OPTIMIZER = "step", "forward", "backward", "optimizer"
SESSION, GATHER, REDUCE = "segment", "gather", "reduce"
"""Names of the ranges: parts of a step, and the run of a segment, whose name goes on with a space and its key."""

_active = False


def activate(active: bool) -> None:
    """Switch the recording of ranges on or off."""
    global _active
    _active = active


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Record a block, or as a decorator each call of a function, as a range of torch.profiler, if recording is on."""
    if not _active:
        yield
        return
    import torch

    with torch.profiler.record_function(PREFIX + name):
        yield
