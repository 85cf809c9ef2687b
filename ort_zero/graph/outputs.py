"""Outputs of any type: tensors out, the rest kept as a schema, and the very type put together again.

ORT's own code knows sequences and mappings. This one adds what models return today: dataclasses, caches of keys and
values, and any object that merely passes through.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Place of the i-th tensor."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    kind: type
    items: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    kind: type
    items: tuple
    """(key, schema) pairs."""
    default: Any = None
    """The factory of a defaultdict."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """A dataclass that is no mapping."""

    kind: type
    items: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class _Cache:
    """A transformers cache: keys and values of each layer."""

    kind: type
    layers: tuple


Schema = _Slot | _Constant | _Sequence | _Mapping | _Fields | _Cache


def flatten(value: Any, *, drop_caches: bool) -> tuple[list[torch.Tensor], Schema]:
    """Return the tensors in `value` and the schema to put it together again.

    Args:
        drop_caches: leave caches of keys and values out (they come back as None). Training ignores them, and as graph
            outputs they would keep every layer's keys and values alive.

    Raises:
        TypeError: a tensor hides in an object that cannot be taken apart.
    """
    tensors: list[torch.Tensor] = []

    def walk(item: Any) -> Schema:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return _Slot(len(tensors) - 1)
        if is_cache(item):
            if drop_caches:
                return _Constant(None)
            return _Cache(type(item), tuple((walk(k), walk(v)) for k, v in _cache_layers(item)))
        if isinstance(item, Mapping):
            items = tuple((key, walk(val)) for key, val in item.items())
            return _Mapping(type(item), items, getattr(item, "default_factory", None))
        if isinstance(item, (list, tuple)):
            return _Sequence(type(item), tuple(walk(val) for val in item))
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            names = [f.name for f in dataclasses.fields(item)]
            return _Fields(type(item), tuple((name, walk(getattr(item, name))) for name in names))
        if _holds_tensors(item, set()):
            raise TypeError(
                f"the module returns a {type(item).__module__}.{type(item).__qualname__}, which holds tensors; "
                "return a tuple, list, dict or dataclass"
            )
        return _Constant(item)

    return tensors, walk(value)


def unflatten(tensors: Any, schema: Schema) -> Any:
    """Return the value that `schema` describes, of the very types that the module returned."""
    if isinstance(schema, _Slot):
        return tensors[schema.index]
    if isinstance(schema, _Constant):
        return schema.value
    if isinstance(schema, _Sequence):
        items = [unflatten(tensors, item) for item in schema.items]
        return schema.kind._make(items) if hasattr(schema.kind, "_make") else schema.kind(items)
    if isinstance(schema, _Mapping):
        items = {key: unflatten(tensors, item) for key, item in schema.items}
        if dataclasses.is_dataclass(schema.kind):  # transformers' ModelOutput
            return schema.kind(**items)
        if issubclass(schema.kind, defaultdict):
            return schema.kind(schema.default, items)
        return schema.kind(items)
    if isinstance(schema, _Fields):
        result = object.__new__(schema.kind)  # __init__ may want more than the fields
        for name, item in schema.items:
            object.__setattr__(result, name, unflatten(tensors, item))
        return result
    cache = schema.kind()
    for layer, (keys, values) in enumerate(schema.layers):
        cache.update(unflatten(tensors, keys), unflatten(tensors, values), layer)
    return cache


def _holds_tensors(item: Any, seen: set[int], depth: int = 6) -> bool:
    """Return True if a computed tensor is inside `item`; modules and their parameters are no results."""
    if isinstance(item, torch.Tensor):
        return not isinstance(item, torch.nn.Parameter)
    if depth == 0 or id(item) in seen or callable(item) or isinstance(item, (str, bytes, ModuleType)):
        return False
    seen.add(id(item))
    if isinstance(item, Mapping):
        parts = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        parts = list(item)
    else:
        slots = [name for cls in type(item).__mro__ for name in vars(cls).get("__slots__", ())]
        parts = [getattr(item, name, None) for name in slots] + list(getattr(item, "__dict__", {}).values())
    return any(_holds_tensors(part, seen, depth - 1) for part in parts)


def is_cache(item: Any) -> bool:
    """Return True for a transformers cache; imports nothing."""
    return any(c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils" for c in type(item).__mro__)


def _cache_layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers = getattr(cache, "layers", None)
    if layers is None or type(cache).__name__ != "DynamicCache":
        raise TypeError(
            f"a {type(cache).__name__} cannot be an output of an ONNX graph in eval mode; call with use_cache=False"
        )
    return [(layer.keys, layer.values) for layer in layers if getattr(layer, "keys", None) is not None]
