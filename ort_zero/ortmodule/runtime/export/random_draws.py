"""Notices that the Python code of a module draws random numbers while it is traced, and at which line.

What is drawn from ``random`` or NumPy is a constant for the tracer, so a graph would repeat the first draw for ever.
:mod:`.compat.tracing` asks at the beginning and at the end of each module's call. Where a function has made an
array or a tensor of what it drew, that function can be called from the graph: see :mod:`.host_functions`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from ort_zero.ortmodule.compat.frames import is_foreign
from ort_zero.ortmodule.runtime.export.random_states import GeneratorStates, generators_of


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
        self._failing: FrameType | None = None
        """The call of the user's code through which an exception went last."""
        self._drawing: list[FrameType] = []
        """The calls of the user's code that were under way when it drew, innermost first."""
        self._function: Any = None
        self.function: Any = None
        """The function that made an array or a tensor of what :meth:`since_last` told of last; None if unknown."""

    def any(self) -> bool:
        """Return whether anything was drawn since the last look, traced or not."""
        return self._states.moved() is not None

    def since_last(self) -> tuple[str, str] | None:
        """Return what the traced code has drawn since the last call, and where ("" if unknown); None for nothing.

        Draws of a submodule that runs in PyTorch inside the graph do not count.
        """
        self._look()
        first, self._first = self._first, None
        self.function, self._function = self._function, None
        self._drawing.clear()
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

    def _look(self, frame: FrameType | None = None) -> None:
        name = self._states.moved()
        if name is not None and self._first is None and torch.jit.is_tracing():
            self._first = f"draws random numbers from {name}", self._place
            while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
                self._drawing.append(frame)
                frame = frame.f_back

    def _at_call(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        return None if is_foreign(frame.f_code.co_filename) else self._at_line

    def _at_line(self, frame: FrameType, event: str, arg: Any) -> Callable:
        self._look(frame)
        if event == "exception":
            self._failing = frame
        elif event == "return" and self._function is None and frame in self._drawing:
            # a function that fails in a trace, where sizes are tensors, returns arrays otherwise or is no operator
            if makes_tensors(arg) or arg is None and self._failing is frame:
                self._function = _function_of(frame)
        at: FrameType | None = frame
        while event == "return" and at is not None and (at is frame or is_foreign(at.f_code.co_filename)):
            at = at.f_back
        self._place = f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}" if at is not None else ""
        return self._at_line


def makes_tensors(result: Any) -> bool:
    """Return True for arrays and tensors, and for tuples of them."""
    if type(result) is tuple:
        return bool(result) and all(map(makes_tensors, result))
    return isinstance(result, (torch.Tensor, np.ndarray))


def _function_of(frame: FrameType) -> FunctionType | None:
    """Return the function that runs in `frame` if it is a global one of its file."""
    found = frame.f_globals.get(frame.f_code.co_name)
    return found if isinstance(found, FunctionType) and found.__code__ is frame.f_code else None
