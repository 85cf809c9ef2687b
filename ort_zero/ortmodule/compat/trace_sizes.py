"""Records what Python code takes from sizes while a module is traced: branches, loops, numbers, numbers of tensors.

A trace keeps the sizes of tensors open, but not what Python code makes of them. Each such read becomes a part of a
:class:`.SizeProgram` with the result that it had, so that a later call knows before the run whether its sizes lead to
the same results.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from ort_zero.log import get_logger
from ort_zero.ortmodule.compat.frames import is_only_message, is_runtime, user_line
from ort_zero.ortmodule.compat.size_program import Evaluation, SizeProgram
from ort_zero.ortmodule.compat.trace_origins import Origin, Origins
from ort_zero.ortmodule.compat.trace_slices import TraceSlices
from ort_zero.ortmodule.compat.trace_state import untraced

_C: Any = torch._C
TRUTH, NUMBER, ELEMENTS, COUNT, RANK, STRIDES = "truth", "number", "elements", "count", "rank", "strides"
"""Kinds of what Python code takes."""
_RESULTS: dict[str, Callable[[Any], Any]] = {
    TRUTH: bool,
    NUMBER: int,
    ELEMENTS: lambda tensor: tensor.tolist(),
    COUNT: len,
    RANK: lambda tensor: tensor.dim(),
    STRIDES: lambda tensor: list(tensor.stride()),
}
_OF_ELEMENTS = frozenset({TRUTH, NUMBER, ELEMENTS})
_PATCHED = {
    "__bool__": TRUTH,
    "is_nonzero": TRUTH,
    "__int__": NUMBER,
    "__index__": NUMBER,
    "__float__": ELEMENTS,
    "__complex__": ELEMENTS,
    "item": ELEMENTS,
    "tolist": ELEMENTS,
    "numpy": ELEMENTS,
    "__array__": ELEMENTS,
    "__contains__": ELEMENTS,
    "stride": STRIDES,
}
"""Methods of tensors that hand Python what a trace cannot follow."""


_AS_NUMBER: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "is_nonzero": bool,
    "__int__": int,
    "__index__": int,
    "__float__": float,
    "item": lambda number: number,
    "tolist": lambda number: number,
}
"""What these methods return for a tensor that stands for a number."""
_FORMATTING = frozenset({"__format__", "__repr__"})
"""Methods of tensors that make a text of a number."""


@dataclass(frozen=True, slots=True)
class SizeRead:
    """Something that Python code has taken from sizes."""

    step: int
    """Step of the program that computes it."""
    kind: str
    seen: Any
    """What it was in the trace."""
    expression: str
    """The Python expression, such as ``"x.shape[1] > 8"``; "" if it is not known."""
    line: str
    """``"FILE:LINE in FUNCTION"`` of the code."""
    module: torch.nn.Module | None
    """The innermost module that ran."""


def result_of(kind: str, computed: Any) -> Any:
    """Return what Python code takes from a tensor or list that a program has computed."""
    return _RESULTS[kind](computed)


def is_kind(kind: object) -> bool:
    """Return whether there is such a kind of what Python code takes."""
    return kind in _RESULTS


class Numbers(Protocol):
    """Knows which tensors are numbers of Python's outside of the trace."""

    traced: set[int]
    """Numbers of their values in the trace."""

    def includes(self, value: Any) -> bool:
        """Return whether a value is such a tensor."""


class SizeReads:
    """Records the reads of one trace.

    Args:
        arguments: tensors among the module's arguments.
        names: their names, for messages.
        varying: tensors that are inputs of the graph besides, and may have other sizes in another call.
        origins: of the same trace.
        running: returns the innermost module that runs.
        not_expressible: called with tensors and a description for what depends on more than the sizes of arguments.
        reads_data: called with a method, the tensor that it is called of, the calling frame, and whether for a truth
            value, for what Python code takes from elements of tensors.
    """

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        names: Sequence[str],
        varying: Sequence[torch.Tensor],
        origins: Origins,
        running: Callable[[], torch.nn.Module | None],
        not_expressible: Callable[[list[torch.Tensor], str], None],
        reads_data: Callable[[Any, torch.Tensor, FrameType, bool], None] = lambda *_: None,
    ):
        self.reads: list[SizeRead] = []
        self._origins = origins
        self._running = running
        self._not_expressible = not_expressible
        self._reads_data = reads_data
        self._slices = TraceSlices([_traced(t) for t in arguments], names, [_traced(t) for t in varying])
        with untraced():
            self.shapes = tuple(tensor.shape for tensor in arguments)
        """Shape of each argument in the trace."""
        self._evaluation = Evaluation(self._slices.program, self.shapes)
        self._numbers: Numbers | None = None
        self._known: set[tuple[int, str]] = set()

    @property
    def numbers(self) -> Numbers | None:
        """Knows which tensors are numbers of Python's outside of the trace."""
        return self._numbers

    @numbers.setter
    def numbers(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._slices.numbers = numbers.traced

    def number_step(self, tensor: torch.Tensor) -> int | None:
        """Return the step that computes the elements of a tensor; None if no size of an argument decides about them.

        Raises:
            NotExpressibleError: they depend on more than sizes.
        """
        value = _traced(tensor)
        with untraced(), _C.DisableTorchFunction():
            return self._slices.step_of(value, elements=True)

    def shape_step(self, tensor: torch.Tensor) -> int | None:
        """Return the step that computes the shape of a tensor; see :meth:`number_step`."""
        value = _traced(tensor)
        with untraced(), _C.DisableTorchFunction():
            return self._slices.step_of(value, elements=False)

    def value_of(self, tensor: torch.Tensor) -> Any:
        """Return the number that a tensor stands for, in Python's precision as far as sizes alone decide about it."""
        try:
            step = self.number_step(tensor)
            if step is not None:
                with untraced(), _C.DisableTorchFunction():
                    return self._evaluation.result(step).item()
        except Exception as error:
            get_logger().debug("a number that only a run can tell: %s", error)
        with untraced(), _C.DisableTorchFunction():
            return tensor.item()

    @property
    def program(self) -> SizeProgram:
        """The steps that compute what was read."""
        return self._slices.program

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is taken from tensors in the block, by whatever code: PyTorch's own functions too."""
        methods = {name: self._recorded(getattr(torch.Tensor, name), kind) for name, kind in _PATCHED.items()}
        methods["nbytes"] = self._nbytes(torch.Tensor.nbytes)
        own = {name: vars(torch.Tensor).get(name) for name in methods}
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)
        try:
            yield
        finally:
            for name, method in own.items():
                if method is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, method)

    def _recorded(self, original: Any, kind: str) -> Any:
        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if _C._is_tracing() and not (is_runtime((frame := sys._getframe(1)).f_code.co_filename)):
                self._note_if_decides(tensor, kind, frame)
                if kind in _OF_ELEMENTS:
                    self._reads_data(original, tensor, frame, kind is TRUTH)
                if self._numbers is not None and kind in _OF_ELEMENTS and self._numbers.includes(tensor):
                    return _AS_NUMBER.get(original.__name__, lambda _: result)(self.value_of(tensor))
            return result

        method.unobserved = original  # type: ignore[attr-defined]
        return method

    def _nbytes(self, original: Any) -> property:
        def nbytes(tensor: torch.Tensor) -> int:
            if _C._is_tracing() and not is_runtime(sys._getframe(1).f_code.co_filename):
                count: Any = tensor.numel()  # a tensor while a trace is made
                self.note(count, NUMBER)
            return original.__get__(tensor)

        return property(nbytes)

    def _note_if_decides(self, tensor: torch.Tensor, kind: str, frame: FrameType) -> None:
        if kind is TRUTH or not is_only_message(frame, text=frame.f_code.co_name in _FORMATTING):
            self.note(tensor, kind)

    def note(self, tensor: torch.Tensor, kind: str) -> None:
        """Record that Python code takes something from `tensor`, if its sizes or those of others decide about it."""
        self.note_value(_traced(tensor), kind, lambda: [tensor] if kind in _OF_ELEMENTS else sizes_of(tensor))

    def note_value(self, value: Any, kind: str, deciding: Callable[[], list[torch.Tensor]]) -> None:
        """Record a read of a traced value.

        Args:
            value: ``torch._C.Value``.
            kind: what is read.
            deciding: returns tensors with the numbers that decide about it, for what no program can express.
        """
        elements = kind in _OF_ELEMENTS
        if self._origins.of(value, "value" if elements else "shape") is not Origin.FIXED:
            return  # guarded as a value
        try:
            with untraced(), _C.DisableTorchFunction():
                step = self._slices.step_of(value, elements=elements)
                if step is None or (step, kind) in self._known:
                    return
                seen = result_of(kind, self._evaluation.result(step))
                text = self._slices.text_of(value) if elements else ""
        except Exception as error:  # an operator that the meta device does not know, or knows otherwise
            get_logger().debug("a size that only a run can tell: %s", error)
            self._not_expressible(deciding(), "takes sizes for Python values")
            return
        self._known.add((step, kind))
        self.reads.append(SizeRead(step, kind, seen, text, user_line(), self._running()))


def sizes_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the sizes of a tensor as the tensors that they are while a trace is made."""
    sizes: Any = tensor.shape
    return list(sizes)


def _traced(tensor: torch.Tensor) -> Any:
    return _C._get_value_trace(tensor)
