"""Choose the modules that are compiled one by one: a unit is a module whose parameters are gathered together.

Repeated blocks are units, and what is left with parameters of its own is a unit each. DeepSpeed's hooks stay around a
unit, so parameters are whole when Dynamo looks, and no collective is in a graph.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ort_zero.compat.deepspeed import elements_of, full_shape
from ort_zero.compat.torch_modules import modules_of, named_modules_of
from ort_zero.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module to compile."""

    path: str
    """The module's path in the model; empty for the model itself."""
    module: nn.Module
    excluded: tuple[str, ...] = ()
    """Paths of submodules, from the unit on, that stay in PyTorch."""


def find_units(
    model: nn.Module,
    *,
    exclude: Sequence[str] = (),
    max_elements: int | None = None,
    stands_alone: Callable[[nn.Module], bool] = lambda module: False,
) -> list[Unit]:
    """Return the units of a model, in the order of ``named_modules``.

    Args:
        exclude: glob patterns of module paths that stay in PyTorch.
        max_elements: the largest number of parameter elements of a unit; larger blocks are divided further. None does
            not limit them.
        stands_alone: returns True for a module that is a unit of its own if the model has blocks, such as a head.

    Raises:
        ConfigError: a pattern of `exclude` matches no module.
    """
    excluded = _excluded(model, exclude)
    blocks = frozenset(_repeated(model))
    apart = blocks | {id(module) for module in modules_of(model) if blocks and stands_alone(module)}

    def units_below(module: nn.Module, path: str) -> Iterator[Unit]:
        if path in excluded or not multiplies(module) or isinstance(module, nn.RNNBase):
            return
        prefix = f"{path}." if path else ""
        is_whole = id(module) in apart or not any(id(below) in apart for below in modules_of(module))
        is_whole = is_whole and not any(map(_is_left_to_python, modules_of(module)))
        is_callable = isinstance(module, nn.Sequential) or not isinstance(module, _CONTAINERS)
        fits = max_elements is None or elements_of(module) <= max_elements
        if is_whole and is_callable and (fits or not any(multiplies(child) for _, child in _children(module))):
            inside = (name.removeprefix(prefix) for name in sorted(excluded) if name.startswith(prefix))
            yield Unit(path, module, tuple(inside))
            return
        for name, child in _children(module):
            yield from units_below(child, prefix + name)

    return list(units_below(model, ""))


def _repeated(model: nn.Module) -> Iterator[int]:
    """Yield the identities of modules that a container holds alone, of one class; a Sequential must hold several."""
    for container in modules_of(model):
        if not isinstance(container, _CONTAINERS):
            continue
        children = [child for _, child in _children(container) if multiplies(child)]
        if len(children) > (not isinstance(container, nn.ModuleList)) and len({type(child) for child in children}) == 1:
            yield from map(id, children)


def multiplies(module: nn.Module, below: bool = True) -> bool:
    """Return True if a module has weights of products: embeddings and norms alone gain nothing from a graph."""
    return any(
        len(full_shape(parameter)) > 1
        for each in (modules_of(module) if below else (module,))
        if not isinstance(each, (nn.Embedding, nn.EmbeddingBag))
        for parameter in each._parameters.values()
        if parameter is not None and not is_lazy(parameter)
    )


def _is_left_to_python(module: nn.Module) -> bool:
    """Return True for a recurrent layer, whose callers Dynamo does not trace, and for parameters without sizes yet."""
    is_unfinished = any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values())
    return isinstance(module, nn.RNNBase) or is_unfinished


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules of ``named_children()``, each module once."""
    children = {id(child): (name, child) for name, child in reversed(module._modules.items()) if child is not None}
    return list(reversed(children.values()))


def _excluded(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    paths = [path for path, _ in named_modules_of(model) if path]
    names: set[str] = set()
    for pattern in patterns:
        matches = [path for path in ("", *paths) if fnmatch.fnmatchcase(path, pattern)]
        if not matches:
            raise ConfigError(f"exclude: the pattern {pattern!r} matches no module; module paths look like {paths[:3]}")
        names.update(matches)
    return frozenset(names)
