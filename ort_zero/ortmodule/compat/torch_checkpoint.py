"""Takes the place of torch's and DeepSpeed's activation checkpointing while a module is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ort_zero.utils.patching import replaced

Run = Callable[[Callable, tuple, dict], Any]
"""Runs a function on positional and keyword arguments, and returns its result."""

_WITHOUT_DYNAMO = "__dynamo_disable"
"""Attribute under which torch's wrapper around ``checkpoint`` keeps the function that it calls."""
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@contextlib.contextmanager
def intercepted(run: Run) -> Iterator[None]:
    """Let `run` stand for every call of activation checkpointing inside the ``with`` block.

    Programs bind ``torch.utils.checkpoint.checkpoint`` early (``functools.partial(checkpoint, use_reentrant=False)``),
    so it is not the name that is replaced but what the function calls.
    """

    def of_torch(function: Callable, *args: Any, **kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in _own_options() & kwargs.keys()}
        with _forward_context(options.get("context_fn")):
            return run(function, args, kwargs)

    class OfTorch:
        @staticmethod
        def apply(function: Callable, preserve: bool, *args: Any) -> Any:
            return run(function, args, {})

    class OfDeepSpeed:
        @staticmethod
        def apply(function: Callable, all_outputs: list, *args: Any) -> Any:
            result = run(function, args, {})
            all_outputs += [result] if isinstance(result, torch.Tensor) else result
            return result

    inner = _torch_checkpoint().__wrapped__
    deepspeed = sys.modules.get(_DEEPSPEED)
    with contextlib.ExitStack() as replacements:
        replacements.enter_context(_attribute(inner, _WITHOUT_DYNAMO, of_torch))
        replacements.enter_context(replaced(torch.utils.checkpoint, "CheckpointFunction", lambda _: OfTorch))
        if deepspeed is not None:
            replacements.enter_context(replaced(deepspeed, "CheckpointFunction", lambda _: OfDeepSpeed))
            replacements.enter_context(
                replaced(deepspeed, "non_reentrant_checkpoint", lambda _: lambda f, *args: run(f, args, {}))
            )
        yield


def _torch_checkpoint() -> Any:
    """Return torch's own function; ORTModule puts a wrapper in its place each time that its import is tried."""
    function: Any = torch.utils.checkpoint.checkpoint
    while not hasattr(function, "__wrapped__"):
        function = inspect.getclosurevars(function).nonlocals["original_checkpoint"]
    return function


@contextlib.contextmanager
def names_of_wrapped_parameters() -> Iterator[None]:
    """Let ``state_dict()`` of a module with ``checkpoint_wrapper`` inside have the names of ``parameters()``.

    The wrapper takes itself out of the keys, and the exporter names the inputs of the graph by these.
    """
    wrapper = sys.modules.get(_WRAPPER)
    if wrapper is None:
        yield
        return
    with replaced(wrapper, "_replace_by_prefix", lambda _: lambda *arguments: None):
        yield


@functools.cache
def _own_options() -> frozenset[str]:
    """Return the keyword arguments that ``checkpoint`` keeps to itself; all others are the function's."""
    parameters = inspect.signature(_torch_checkpoint()).parameters.values()
    return frozenset({p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | {"preserve_rng_state"})


def _forward_context(context_fn: Callable[[], tuple] | None) -> Any:
    """Return the context in which the function is to run; one that only selects what is saved is left out."""
    if context_fn is None:
        return contextlib.nullcontext()
    context, _ = context_fn()
    return contextlib.nullcontext() if isinstance(context, TorchDispatchMode) else context


@contextlib.contextmanager
def _attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give `holder` an attribute within the block, which it may have or not."""
    missing = object()
    before = getattr(holder, name, missing)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
