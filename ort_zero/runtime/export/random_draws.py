"""Notices that the Python code of a module draws random numbers while it is traced, and at which line.

What is drawn from ``random`` or NumPy is a constant for the tracer, so a graph would repeat the first draw for ever.
:mod:`ort_zero.compat.tracing` asks at the beginning and at the end of each module's call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ort_zero.compat.frames import is_foreign
from ort_zero.runtime.export.random_states import GeneratorStates, generators_of


class RandomDraws:
    """Tells who draws from the generators of Python and NumPy that the code of a module can reach.

    Args:
        root: the user's module.
    """

    def __init__(self, root: torch.nn.Module):
        self._states = GeneratorStates(generators_of(root))
        self._place = ""
        """Where the user's code was at the last line that began; "" while lines are not followed."""
        self._first: tuple[str, str] | None = None

    def any(self) -> bool:
        """Return whether anything was drawn since the last look, traced or not."""
        return self._states.moved() is not None

    def since_last(self) -> tuple[str, str] | None:
        """Return what the traced code has drawn since the last call, and where ("" if unknown); None for nothing.

        Draws of a submodule that runs in PyTorch inside the graph do not count.
        """
        self._look()
        first, self._first = self._first, None
        return first

    @contextlib.contextmanager
    def lines_followed(self) -> Iterator[None]:
        """Follow each line of the user's code in the block, which makes it slower by the looks at the generators."""
        before = sys.gettrace()
        sys.settrace(self._at_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._place = ""

    def _look(self) -> None:
        name = self._states.moved()
        if name is not None and self._first is None and torch.jit.is_tracing():
            self._first = f"draws random numbers from {name}", self._place

    def _at_call(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        return None if is_foreign(frame.f_code.co_filename) else self._at_line

    def _at_line(self, frame: FrameType, event: str, arg: Any) -> Callable:
        self._look()
        at: FrameType | None = frame
        while event == "return" and at is not None and (at is frame or is_foreign(at.f_code.co_filename)):
            at = at.f_back
        self._place = f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}" if at is not None else ""
        return self._at_line
