"""Notices calls of a model's modules that PyTorch runs although the model was given to ONNX Runtime.

ONNX Runtime runs calls of the wrapped model, that is its ``forward``. Another method (``engine.module.encode(x)``,
``generate``), a submodule that is called by itself, and the user's own module called in place of the engine run in
PyTorch. That is right, but nothing else would say so. Two hooks on all modules of the process look for the outermost
call of a module of such a model; calls inside of that one cost a look into a dict each.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ort_zero.log import get_logger

EMPTY = "forward with a batch of size 0"
SHARED = "forward with arguments that share memory"
TRANSFORMED = "forward in a transform of torch.func"
REPLACED = "forward with the parameters of functional_call"
PROFILED = "forward under DeepSpeed's flops profiler"
"""Key of the calls whose operations DeepSpeed counts, by hooks that no graph calls."""
UNINITIALIZED = "forward that initializes parameters"
_WHOLE_CALLS = {
    EMPTY: "batches of size 0 are run by PyTorch",
    SHARED: "arguments that share memory, where the forward changes one in place, are run by PyTorch",
    TRANSFORMED: "calls in torch.func's transforms (vmap, grad, jvp) are run by PyTorch",
    REPLACED: "calls for which functional_call replaces parameters are run by PyTorch",
    PROFILED: "the step that DeepSpeed's flops profiler counts is run by PyTorch, whose operations it knows",
    UNINITIALIZED: "the first call initializes lazy modules and is run by PyTorch",
}
"""The messages about the calls of the engine that PyTorch runs as a whole, by what stands for the method in counts."""
SECOND_ORDER = "backward with create_graph=True"
"""Stands for the method in the counts of gradients that are to be differentiated themselves."""
_TORCH_FILE = torch_module.__file__


class _Thread(threading.local):
    inside: int | None = None
    """``id()`` of the module whose call was noted; -1 while a graph runs or is made; None outside of both."""


_thread = _Thread()
_models: dict[int, tuple[weakref.ref, weakref.ref]] = {}
"""Module and :class:`CallsInTorch` of each module of all models, by the ``id()`` of the module."""
_hooks: list[Any] = []


class CallsInTorch:
    """Counts the calls of one model's modules that PyTorch runs, by the method that makes them.

    Args:
        model: the user's module.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        self.methods: Counter[str] = Counter()
        """Number of calls of modules by each method: ``"generate"``, ``"encoder.forward"``."""
        weakref.finalize(self, _remove_hooks).atexit = False
        self.follow()

    def follow(self) -> None:
        """Look at all modules that the model has now."""
        model = self._model()
        if model is None:
            return
        here = weakref.ref(self)
        for key in [key for key, (module, calls) in _models.items() if module() is None or calls() is None]:
            del _models[key]
        _models.update((id(module), (weakref.ref(module), here)) for module in model.modules())
        if not _hooks:
            _hooks.append(torch_module.register_module_forward_pre_hook(_enter))
            _hooks.append(torch_module.register_module_forward_hook(_leave, always_call=True))

    def note(self, frame: FrameType | None) -> None:
        """Count the call that begins at `frame`; the first one of each method is told.

        Args:
            frame: innermost frame of the stack to look at.
        """
        model = self._model()
        if model is None:
            return
        method = _outermost_method(frame, {id(module): name for name, module in model.named_modules()})
        self.methods[method] += 1
        if self.methods[method] == 1:
            what = "the module itself" if method == "forward" else method
            get_logger().info(
                "%s: %s is run by PyTorch; ONNX Runtime runs calls of the engine alone, that is its forward",
                type(model).__name__,
                what,
            )

    def note_second_order(self) -> None:
        """Count gradients that are to be differentiated themselves, which PyTorch computes; the first time is told."""
        self.methods[SECOND_ORDER] += 1
        model = self._model()
        if self.methods[SECOND_ORDER] == 1 and model is not None:
            get_logger().info(
                "%s: gradients that are differentiated themselves (create_graph=True) are computed by PyTorch, which "
                "runs the forward again for them", type(model).__name__,
            )  # fmt: skip

    def note_whole_call(self, why: str) -> None:
        """Count a call of the engine that PyTorch runs as a whole; the first one is told.

        Args:
            why: a key of the messages, such as :data:`EMPTY`.
        """
        self.methods[why] += 1
        model = self._model()
        if self.methods[why] == 1 and model is not None:
            get_logger().info("%s: %s", type(model).__name__, _WHOLE_CALLS[why])


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Note no calls in the block, in which a graph runs or is made, or PyTorch has taken over."""
    before, _thread.inside = _thread.inside, -1
    try:
        yield
    finally:
        _thread.inside = before


def _enter(module: torch.nn.Module, args: Any) -> None:
    if _thread.inside is not None or torch.compiler.is_compiling():
        return
    known = _models.get(id(module))
    if known is None or known[0]() is not module:
        return
    calls = known[1]()
    if calls is not None:
        _thread.inside = id(module)
        calls.note(sys._getframe(1))


def _leave(module: torch.nn.Module, args: Any, result: Any) -> None:
    if _thread.inside == id(module) and not torch.compiler.is_compiling():
        _thread.inside = None


def _outermost_method(frame: FrameType | None, paths: dict[int, str]) -> str:
    """Return the method of a module of the model that runs at `frame` and was called from outside of the model.

    Args:
        frame: innermost frame of the stack to look at.
        paths: path of each module in the model by its ``id()``.
    """
    found = "forward"
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            path = paths.get(id(owner)) if isinstance(owner, torch.nn.Module) else None
            if owner is not None and path is not None and _is_method(owner, frame.f_code):
                name = "forward" if code.co_filename == _TORCH_FILE else code.co_name
                found = f"{path}.{name}" if path else name
        frame = frame.f_back
    return found


def _is_method(owner: torch.nn.Module, code: CodeType) -> bool:
    """Return whether `code` is that of a method of `owner`; a function may be given a module as its first argument."""
    method = vars(owner).get(code.co_name) or getattr(type(owner), code.co_name, None)
    if isinstance(method, property):
        method = method.fget
    return getattr(inspect.unwrap(method), "__code__", None) is code if callable(method) else False


def _remove_hooks() -> None:
    """Take the hooks away once no model is left to look at."""
    if all(calls() is None for _, calls in list(_models.values())):
        _models.clear()
        while _hooks:
            _hooks.pop().remove()
