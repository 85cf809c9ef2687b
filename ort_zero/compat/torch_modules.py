"""Read private attributes of torch's tensors and of the wrappers of modules."""

from __future__ import annotations

from typing import Any

WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which torch's wrappers (``torch.compile``, activation checkpointing, FSDP) hold the module they wrap."""


def inside_of_compiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped in `module`."""
    return module._modules["_orig_mod"]


def inside_of_ortmodule(module: Any) -> Any:
    """Return the user's module where `module` is an ORTModule around it, else `module` itself; imports nothing."""
    return module.module if any(base.__name__ == "ORTModule" for base in type(module).__mro__) else module


def version_of(tensor: Any) -> int:
    """Return how often the values of `tensor` were changed in place; views of one tensor count together.

    Returns 0 for a tensor that was made under ``torch.inference_mode()``, which has no counter.
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0


def is_view(tensor: Any) -> bool:
    """Return True for a view of another tensor."""
    return bool(tensor._is_view())
