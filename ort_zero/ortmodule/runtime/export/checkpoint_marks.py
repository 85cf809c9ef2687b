"""Traces the calls of torch's activation checkpointing as plain calls, and marks where each begins and ends.

The marks are autograd Functions that pass a tensor on, so that the training graph and its backward have a node there.
:mod:`ort_zero.ortmodule.recompute.checkpointed_blocks` finds by them what belongs to a block and takes them out again.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat import torch_checkpoint, trace_state
from ort_zero.ortmodule.compat.replaced_methods import called_method
from ort_zero.utils.tree_map import map_arguments, map_slots

_READ_BY_PYTHON = frozenset("item tolist numpy size dim numel stride type __get__ __set__ __setitem__".split())
"""Functions whose result is no tensor of the block's own."""
_CHANGES = re.compile(r"[^_]_$|^__i")
"""Matches the names of functions that may change what they are given."""


class BlockMark(torch.autograd.Function):
    """Marks a tensor that a checkpointed block reads or returns; never runs in ONNX Runtime."""

    passes_on = True
    """The tracer and the exporter take the result for the tensor itself."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, block: int, is_result: int) -> torch.Tensor:
        """Return a copy, since an alias could not be changed in place by the block."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradient of the tensor as it came."""
        return gradient, None, None

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Return shape and type for ORT: those of the input."""
        return [shapes[0]], [types[0]]


MARK = f"{BlockMark.__module__}.{BlockMark.__qualname__}"
"""Name of the marks in a graph; see :data:`ort_zero.ortmodule.recompute.checkpointed_blocks.MARK`."""


class CheckpointedCalls:
    """Runs what a module gives to activation checkpointing while it is traced.

    Args:
        refuse: raises the error for a module that uses activation checkpointing; None to trace the calls.
        marked: whether the blocks are marked in the trace; a graph without gradients needs no marks.
        same: called with each tensor and its marked copy, which stands for the same value.
    """

    def __init__(
        self,
        refuse: Callable[[], Any] | None,
        *,
        marked: bool,
        same: Callable[[torch.Tensor, torch.Tensor], None] = lambda tensor, marked: None,
    ):
        self._refuse = refuse
        self._marked = marked
        self._same = same
        self._blocks = 0
        self._inside = False
        self.called = False
        """Whether the module has given anything to activation checkpointing."""

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Take the place of activation checkpointing in the block."""
        with torch_checkpoint.intercepted(self._run), torch_checkpoint.names_of_wrapped_parameters():
            yield

    def _run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a checkpointed function. A block inside of another one is a part of that one."""
        self.called = True
        if self._refuse is not None:
            return self._refuse()
        if not self._marked or self._inside or not torch.jit.is_tracing():
            return function(*args, **kwargs)
        self._blocks += 1
        self._inside = True
        try:
            return self._marked_call(self._blocks - 1, function, args, kwargs)
        finally:
            self._inside = False

    def _marked_call(self, block: int, function: Callable, args: tuple, kwargs: dict) -> Any:
        marks = _Marks(lambda tensor: self._mark(tensor, block, is_result=False))
        function = _with_marked_arguments(function, marks)
        args, kwargs = map_arguments(marks.read, args, kwargs)
        with marks:
            result = function(*args, **kwargs)
        marks.pass_changes_on()
        return map_slots(lambda slot, tensor: self._mark(tensor, block, is_result=True), result)

    def _mark(self, tensor: torch.Tensor, block: int, *, is_result: bool) -> torch.Tensor | None:
        """Return the tensor with a mark; None for a parameter, which is there all the time."""
        if isinstance(tensor, torch.nn.Parameter):
            return None
        marked = BlockMark.apply(tensor, block, int(is_result))
        self._same(tensor, marked)
        return marked


@contextlib.contextmanager
def plain_calls() -> Iterator[None]:
    """Let checkpointed functions run as plain ones in the block.

    For submodules that PyTorch runs inside the graph: a checkpoint holds the very tensors that it is given until the
    backward, and ORT reuses the memory of those.
    """
    with torch_checkpoint.intercepted(lambda function, args, kwargs: function(*args, **kwargs)):
        yield


def _with_marked_arguments(function: Callable, marks: _Marks) -> Callable:
    """Return `function` with marks on the tensors that ``functools.partial`` has bound to it."""
    if type(function) is not functools.partial:
        return function
    args, kwargs = map_arguments(marks.read, function.args, function.keywords)
    return functools.partial(_with_marked_arguments(function.func, marks), *args, **kwargs)


class _Marks(TorchFunctionMode):
    """The marks of one block: on its arguments, and on other tensors from outside when the block reads them.

    Such are the tensors of a closure, and those in objects that are given as arguments.

    Args:
        mark: returns a tensor with a mark, None for one that needs none.
    """

    def __init__(self, mark: Callable[[torch.Tensor], torch.Tensor | None]):
        super().__init__()
        self._mark = mark
        self._marked: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """By identity: the tensor outside, the one inside, and how often that was changed in place at first."""
        self._own: dict[int, torch.Tensor] = {}
        """Tensors that came to exist in the block, by identity; they are held, so that no other one gets that."""

    def read(self, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor as the block sees it; None for one that needs no mark."""
        if id(tensor) in self._own:
            return None
        if id(tensor) not in self._marked:
            marked = self._mark(tensor)
            if marked is None:
                return None
            self._own[id(marked)] = marked
            self._marked[id(tensor)] = (tensor, marked, version_of(marked))
        return self._marked[id(tensor)][1]

    def pass_changes_on(self) -> None:
        """Change what the block was given as the block has changed it."""
        for tensor, marked, version in self._marked.values():
            if version_of(marked) != version:
                tensor.copy_(marked)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func, kwargs = called_method(func), kwargs or {}
        if not torch.jit.is_tracing():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in _READ_BY_PYTHON and not _CHANGES.search(name) and "out" not in kwargs:
            args, kwargs = map_arguments(self._read_by_function, args, kwargs)
        result = func(*args, **kwargs)
        map_slots(self._note, result)
        return result

    def _read_by_function(self, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        # single numbers and what is there all the time are not worth a mark, and buffers may be changed in place
        if not trace_state.is_computed(tensor):
            return None
        return self.read(slot, tensor)

    def _note(self, slot: str, tensor: torch.Tensor) -> None:
        self._own[id(tensor)] = tensor
