"""Read private attributes of torch's tensors and of the wrappers of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which torch's wrappers (``torch.compile``, activation checkpointing, FSDP) hold the module they wrap."""


def named_modules_of(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the paths and modules of ``named_modules()``, each module once, whatever methods a class replaces."""
    waiting, seen = [(path, module)], set()
    while waiting:
        path, current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        prefix = f"{path}." if path else ""
        below = [(prefix + name, child) for name, child in current._modules.items() if child is not None]
        waiting += reversed(below)


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and the modules below, each once, as :func:`named_modules_of`."""
    return (each for _, each in named_modules_of(module))


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module and of the modules below, each once, by what torch itself keeps."""
    every = (parameter for each in modules_of(module) for parameter in each._parameters.values())
    return list({id(parameter): parameter for parameter in every if parameter is not None}.values())


def inside_of_compiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped in `module`."""
    return module._modules["_orig_mod"]


def inside_of_ortmodule(module: Any) -> Any:
    """Return the user's module where `module` is an ORTModule around it, else `module` itself; imports nothing."""
    return module.module if any(base.__name__ == "ORTModule" for base in type(module).__mro__) else module


def version_of(tensor: Any) -> int:
    """Return how often the values of `tensor` were changed in place; views of one tensor count together."""
    try:
        return tensor._version
    except RuntimeError:  # made under torch.inference_mode()
        return 0


def is_view(tensor: Any) -> bool:
    """Return True for a view of another tensor."""
    return bool(tensor._is_view())


def without_base(value: Any) -> Any:
    """Return a tensor that is no view, on the memory of a view; any other value itself.

    Autograd refuses to change a graph's view in place, where PyTorch's kernel returns no view (``_unsafe_view``).
    """
    if type(value) is not torch.Tensor or value.layout is not torch.strided or not value._is_view():
        return value
    if value.is_conj() or value.is_neg():
        return value
    tensor = torch.empty(0, dtype=value.dtype, device=value.device)
    return tensor.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
