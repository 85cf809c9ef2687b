"""The class of our ORTModules: through one of them its user sees the module that was wrapped.

Upstream copies each method of the user's module and binds the copy to the wrapper, where ``super()``, class methods and
private attributes of the class fail. Here methods, properties and attributes are the user's own: what the wrapper does
not need for itself is looked up in the module. ``isinstance`` takes the wrapper for both, an ORTModule and an instance
of the user's class. A copy of a wrapper wraps a copy of the module; a pickle of it holds the module alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ort_zero.log import get_logger

COPIED = "_ort_zero_wrap_copy"
"""Attribute of a wrapper: the function that wraps a copy of its module the same way."""
PICKLES_ITSELF = "_ort_zero_pickles_itself"
"""Attribute of a wrapper: whether a pickle of it is a wrapper again, by the function under :data:`COPIED`."""
_OF_THE_WRAPPER = frozenset(
    "__init__ __new__ __del__ __init_subclass__ __class_getitem__ __call__ __delattr__ __dir__ __getattribute__ "
    "__copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ __hash__ __eq__ _call_impl _wrapped_call_impl".split()
)
"""Methods of a user's class that are never called in place of the wrapper's."""
_PLAIN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, the wrapper beside the user's."""


def wrapper_class(upstream: type, user_class: type, derived: type | None = None) -> type:
    """Return the class of the ORTModules around modules of `user_class`.

    Python looks special methods up in the class of an object (``__len__``, ``__iter__``, ``__getitem__``, ...), and so
    it does with methods of torch's Module that a user's class overrides (``to``, ``eval``, ...). Modules that differ in
    these have wrappers of different classes.

    Args:
        upstream: the class ORTModule of onnxruntime-training.
        user_class: class of the modules to wrap.
        derived: class below `upstream` that somebody has written, whose methods come first.
    """
    return _class_with(upstream, derived or upstream, tuple(sorted(set(_overridden(upstream, user_class)))))


@functools.cache
def _class_with(upstream: type, derived: type, methods: tuple[str, ...]) -> type:
    bases = (_base(upstream),) if derived is upstream else (derived, _base(upstream))
    forwarded = {name: _forwarded(name) for name in methods if not hasattr(derived, name) or derived is upstream}
    return type(derived.__name__, bases, {**forwarded, "__module__": derived.__module__})


@functools.cache
def _base(upstream: Any) -> type:
    class ORTModule(upstream):
        """An ORTModule that shows the module inside it."""

        @property  # type: ignore[misc]
        def __class__(self) -> type:  # type: ignore[override]
            # isinstance() asks type(self) first, so that this adds the user's class and hides nothing
            return _module_of(self).__class__ if vars(self).get("_is_initialized") else type(self)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *dir(type(self)), *dir(_module_of(self))})

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training" and vars(self).get("_is_initialized"):
                _module_of(self).training = value  # as of the wrapper, below
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if name in vars(self):
                super().__delattr__(name)
            else:
                delattr(_module_of(self), name)

        def compile(self, *args: Any, **kwargs: Any) -> None:
            """Leave the module as it is: torch's compiler would only see the call of the graph."""
            get_logger().info(
                "torch.compile has no effect on %s, which runs in ONNX Runtime", type(_module_of(self)).__name__
            )

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return _module_of(self).named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return _module_of(self).named_buffers(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return _module_of(self).state_dict(*args, **kwargs)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return _module_of(self).load_state_dict(*args, **kwargs)

        def __copy__(self) -> Any:
            return vars(self)[COPIED](copy.copy(_module_of(self)))

        def __deepcopy__(self, memo: dict) -> Any:
            # a session cannot be copied, and the copy will want graphs of its own
            return vars(self)[COPIED](copy.deepcopy(_module_of(self), memo))

        def __reduce_ex__(self, protocol: Any) -> Any:
            if vars(self).get(PICKLES_ITSELF):
                return vars(self)[COPIED], (_module_of(self),)
            return _module_of(self).__reduce_ex__(protocol)

    return ORTModule


def _module_of(wrapper: Any) -> Any:
    return vars(wrapper)["_torch_module"].module


def _overridden(upstream: type, user_class: type) -> Iterator[str]:
    """Yield the names of the methods of `user_class` that ``__getattr__`` of a wrapper cannot lead to."""
    for owner in _user_classes(user_class):
        for name, value in vars(owner).items():
            # upstream's own methods ask the user's module themselves
            if inspect.isfunction(value) and name not in _OF_THE_WRAPPER and name not in vars(upstream):
                is_special = name.startswith("__") and name.endswith("__")
                if is_special or hasattr(torch.nn.Module, name):
                    yield name


def _forwarded(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = _module_of(self)
        result = getattr(module, name)(*args, **kwargs)
        vars(self)["training"] = module.training
        # "model = model.to(device)" must not lead away from ONNX Runtime
        return self if result is module else result

    method.__name__ = name
    return method


def warn_of_collisions(wrapper: Any, module: Any, logger: logging.Logger) -> None:
    """Warn of each attribute of the user's module that has the name of one of the wrapper's own."""
    own = {*vars(wrapper), *vars(_upstream_of(type(wrapper)))} - {"forward", "training"}
    of_user = {name for owner in _user_classes(type(module)) for name in vars(owner)}
    for name in sorted((of_user | set(vars(module))) & own):
        if not name.startswith("__") and name not in _PLAIN_ATTRIBUTES:
            if callable(getattr(type(module), name, None)):
                instead = "ORTModule's own method is called, and calls the module's"
            else:
                instead = f"The ORTModule shows its own; the module's is .module.{name}"
            logger.warning("%s collides with ORTModule's attribute name. %s", name, instead)


def _upstream_of(cls: type) -> type:
    return next(owner for owner in cls.__mro__ if torch.nn.Module in owner.__bases__)


def _user_classes(user_class: type) -> list[type]:
    return [owner for owner in user_class.__mro__ if owner not in (torch.nn.Module, object)]
