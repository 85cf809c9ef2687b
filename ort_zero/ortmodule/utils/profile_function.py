"""A profile function of our own for a while, without taking away the profiler under which the program runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def profile_function(function: Callable[[FrameType, str, Any], object]) -> Iterator[None]:
    """Have the interpreter call `function` at each call and return of this thread while the block runs.

    A profiler that was at work sees nothing of the block and goes on after it. ``sys.setprofile`` does not take back
    the object that ``sys.getprofile`` returns for ``cProfile.Profile``: that one is switched on by its own method. The
    profiler of ``torch.profiler.profile(with_stack=True)`` has no such method: it sees no Python calls after the block,
    until it starts anew; operators it goes on recording.
    """
    before: Any = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(None)
        if callable(before):
            sys.setprofile(before)
        elif hasattr(before, "enable"):
            before.enable()
