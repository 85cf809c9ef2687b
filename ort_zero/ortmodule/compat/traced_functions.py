"""Lets calls of autograd Functions be seen while a module is traced, in whatever way the module calls them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import function as torch_function

from ort_zero.ortmodule.compat.frames import is_foreign

Apply = Callable[..., Any]
_RULES = "symbolic", "infer_shape", "alias_input"
"""Methods by which the author of a Function says how ONNX, or ORTModule, is to export it."""


@contextlib.contextmanager
def calls_go_to(
    call: Callable[[type, Apply, tuple, dict], Any],
    around: Callable[[type, tuple, bool], AbstractContextManager],
) -> Iterator[None]:
    """Have ``call(function, apply, args, kwargs)`` take the place of each ``apply`` that is traced in the block.

    Functions that are exported by rules of their own are called as ever: see :func:`has_own_export`.

    Args:
        call: returns what ``apply(*args, **kwargs)``, torch's own, would return.
        around: makes the context in which a Function is called, of the Function, its arguments, and whether a node of
            the graph is going to call it.
    """

    def wrapped(original: Any) -> Any:
        def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            def own(*args: Any, **kwargs: Any) -> Any:
                return original.__get__(None, cls)(*args, **kwargs)

            traced = torch.jit.is_tracing()
            with around(cls, args, traced and not hasattr(cls, "symbolic")):
                if not traced or has_own_export(cls):
                    return own(*args, **kwargs)
                return call(cls, own, args, kwargs)

        return classmethod(apply)

    # the base of Function: models keep `apply` of their classes in variables, and each one ends here. Since torch 2.15
    # Function has that of C, which nothing below it sees
    in_c = isinstance(vars(torch.autograd.Function)["apply"], types.ClassMethodDescriptorType)
    base: Any = torch.autograd.Function if in_c else torch_function._SingleLevelFunction
    original = next(vars(cls)["apply"] for cls in base.__mro__ if "apply" in vars(cls))
    outer = vars(base).get("apply")
    base.apply = wrapped(original)
    kept = list(_kept_in_variables()) if in_c else []
    for module, name, value in kept:
        setattr(module, name, value.__self__.apply)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        if outer is None:
            del base.apply
        else:
            base.apply = outer


def _kept_in_variables() -> Iterator[tuple[Any, str, Any]]:
    """Yield the globals of the user's modules that are the ``apply`` of a Function: module, name, and what it holds."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        file = names.get("__file__")
        if not isinstance(file, str) or is_foreign(file):
            continue
        for name, value in list(names.items()):
            if isinstance(value, types.BuiltinMethodType) and value.__name__ == "apply":
                owner = value.__self__
                if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                    yield module, name, value


def has_own_export(function: type) -> bool:
    """Return True if a rule says how calls of the autograd Function `function` are exported."""
    from onnxruntime.training.ortmodule import _custom_autograd_function_exporter as exporter
    from onnxruntime.training.ortmodule._utils import get_fully_qualified_class_name

    if any(hasattr(function, rule) for rule in _RULES) or function.__name__ == "CheckpointFunction":
        return True
    return exporter._SpecialCustomFunctionHandler.get_handler(get_fully_qualified_class_name(function)) is not None
