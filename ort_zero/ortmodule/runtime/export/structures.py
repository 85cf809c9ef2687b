"""What is left of arguments and results when their tensors are taken out: nodes that compare by what they stand for.

Made and read by :mod:`.pytree`, compared by :mod:`.structure_changes`, kept on disk by the export cache.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

import torch

from ort_zero.ortmodule.runtime.export.plain_objects import PLAIN, is_cache_type

_COMPARED_BY_VALUE = (*PLAIN, torch.Size, MethodType, BuiltinMethodType)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLeaf:
    """Stands for the i-th tensor of a call or of a result."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ConstantLeaf:
    """A value that is no tensor. Plain values are compared by type and value, methods by their objects, all others are
    the same or not."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConstantLeaf):
            return NotImplemented
        if self.value is other.value:
            return True
        same = type(self.value) is type(other.value) and isinstance(self.value, _COMPARED_BY_VALUE)
        return same and self.value == other.value


@dataclasses.dataclass(frozen=True, slots=True)
class NumberLeaf:
    """A Python number that the i-th tensor holds, without axes: it changes from call to call."""

    index: int
    kind: type[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class GivenLeaf:
    """The very tensor or container that the caller has given."""

    path: tuple
    """Keys that lead there from ``(args, kwargs)``."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldLeaf:
    """A parameter or buffer of the module; its value is the i-th tensor too."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SizeLeaf:
    """A ``torch.Size`` whose numbers the i-th tensor holds."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list, tuple, named tuple or deque."""

    kind: type[Any]
    items: tuple
    """The structure of each item, in order."""
    maxlen: int | None = None
    """Maximum number of items of a deque, None for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class MappingNode:
    """A dict, or an object that behaves as one and is built from one."""

    kind: type[Any]
    items: tuple
    """A (key, structure) pair for each entry, in order."""
    default: Any = None
    """The ``default_factory`` of a defaultdict, None for other mappings."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectNode:
    """An instance of a class written in Python, by its attributes."""

    kind: type[Any]
    items: tuple
    """An (attribute, structure) pair for each attribute, in order."""
    number: int
    """Counts the objects of one value, so that one that occurs twice, or holds itself, is built once."""
    origin: int | None = None
    """Number of the argument that this result is, changed by the module in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """The object that was flattened before under this number."""

    number: int


NESTED = (SequenceNode, MappingNode, ObjectNode)
"""The nodes that have others inside."""

_Leaf = TensorLeaf | ConstantLeaf | NumberLeaf | GivenLeaf | HeldLeaf | SizeLeaf
Structure = _Leaf | SequenceNode | MappingNode | ObjectNode | Reference


def number_of(kind: type) -> Structure:
    """Return the structure of a value that is one Python number."""
    return NumberLeaf(0, kind)


def with_numbers(structure: Structure, like: Structure) -> Structure:
    """Return the structure of a traced result, in which Python numbers are numbers.

    Args:
        structure: numbers that were computed from sizes are tensors in it.
        like: the structure of the same result when the module runs untraced.
    """
    if isinstance(structure, TensorLeaf) and isinstance(like, ConstantLeaf) and is_number(like.value):
        return NumberLeaf(structure.index, type(like.value))
    if isinstance(structure, NESTED) and isinstance(like, NESTED) and same_kind(structure, like):
        if len(structure.items) == len(like.items):
            pairs = zip(structure.items, like.items, strict=True)
            if isinstance(structure, SequenceNode):
                return dataclasses.replace(structure, items=tuple(with_numbers(item, other) for item, other in pairs))
            named = tuple(
                (key, with_numbers(item, other[1]) if key == other[0] else item) for (key, item), other in pairs
            )
            return dataclasses.replace(structure, items=named)
    return structure


def same_kind(old: SequenceNode | MappingNode | ObjectNode, new: SequenceNode | MappingNode | ObjectNode) -> bool:
    """Return whether two nodes stand for values of one class."""
    return type(old) is type(new) and old.kind is new.kind


def parts(item: SequenceNode | MappingNode | ObjectNode) -> list[tuple[str, Structure]]:
    """Return the nodes inside of one, each with what leads to it in Python: ``[0]``, ``['mask']``, ``.hidden``."""
    if isinstance(item, SequenceNode):
        return [(f"[{i}]", part) for i, part in enumerate(item.items)]
    if isinstance(item, MappingNode):
        return [(f"[{key!r}]", part) for key, part in item.items]
    return [(f".{attribute}", part) for attribute, part in item.items]


def arguments_of(structure: tuple) -> list[tuple[str, Structure]]:
    """Return the arguments of a call as messages name them: ``arg 0``, ``"labels"``."""
    positional, keyword = structure
    by_position = [(f"arg {i}", item) for i, item in enumerate(positional)]
    return by_position + [(f'"{name}"', item) for name, item in keyword]


def described(item: Structure | None) -> str:
    """Return a word or two for what a structure stands for."""
    if item is None:
        return "not given"
    if isinstance(item, ConstantLeaf):
        return repr(item.value)[:40]
    if isinstance(item, TensorLeaf):
        return "tensor"
    return item.kind.__name__ if hasattr(item, "kind") else "an object"


def types_in(structure: Structure) -> Iterator[type[Any]]:
    """Yield the type of each container, object and constant in a structure, but for caches of keys and values."""
    if isinstance(structure, ConstantLeaf):
        yield type(structure.value)
    elif isinstance(structure, (SequenceNode, MappingNode, ObjectNode)) and not is_cache_type(structure.kind):
        yield structure.kind
        for _, part in parts(structure):
            yield from types_in(part)


def types_in_call(structure: tuple) -> Iterator[type[Any]]:
    """Yield the type of each container, object and constant among the arguments of a call."""
    for _, item in arguments_of(structure):
        yield from types_in(item)


def constants_in_call(structure: tuple) -> Iterator[Any]:
    """Yield the values among the arguments of a call that are neither tensors nor containers."""
    stack = [item for _, item in arguments_of(structure)]
    while stack:
        item = stack.pop()
        if isinstance(item, ConstantLeaf):
            yield item.value
        elif isinstance(item, NESTED):
            stack += [part for _, part in parts(item)]


def is_number(value: Any) -> bool:
    """Return whether `value` is a Python number, and no bool, which is a switch."""
    return type(value) in (int, float)


def named_arguments(structure: tuple, parameters: Sequence[inspect.Parameter]) -> list[tuple[str, Structure]]:
    """Return the arguments of a call by the names that the parameters of ``forward`` give them."""
    positional, keyword = structure
    return [*zip(positional_names(len(positional), parameters), positional, strict=False), *keyword]


def positional_names(count: int, parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return the names of the first `count` positional arguments."""
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [*names, *(f"argument_{i}" for i in range(len(names), count))][:count]
