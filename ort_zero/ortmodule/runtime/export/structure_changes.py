"""Tells in words in which arguments two calls differ, by their structures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from ort_zero.ortmodule.runtime.export.structures import (
    NESTED,
    ConstantLeaf,
    Structure,
    TensorLeaf,
    arguments_of,
    described,
    is_number,
    named_arguments,
    parts,
    same_kind,
)


def changed_numbers(old: tuple, new: tuple, parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return the names of the arguments that are numbers in the structures of two calls, and not the same ones."""
    found = []
    for before, after in zip(named_arguments(old, parameters), named_arguments(new, parameters), strict=False):
        (name, one), (other_name, other) = before, after
        if name == other_name and isinstance(one, ConstantLeaf) and isinstance(other, ConstantLeaf) and one != other:
            found += [name] if is_number(one.value) and type(one.value) is type(other.value) else []
    return found


def differences(old: tuple, new: tuple) -> list[str]:
    """Describe every argument, or part of one, in which the structures of two calls differ."""
    before, after = dict(arguments_of(old)), dict(arguments_of(new))
    firsts = _first_names(before), _first_names(after)
    found: list[str] = []
    for name in {**before, **after}:
        found += _differences(name, before.get(name), after.get(name), firsts)
    return found


def _first_names(arguments: Mapping[str, Structure]) -> dict[int, str]:
    """Return the first place of each tensor, by its number."""
    names: dict[int, str] = {}
    stack = list(reversed(list(arguments.items())))
    while stack:
        name, item = stack.pop()
        if isinstance(item, TensorLeaf):
            names.setdefault(item.index, name)
        elif isinstance(item, NESTED):
            stack += [(f"{name}{key}", part) for key, part in reversed(parts(item))]
    return names


def _differences(name: str, old: Structure | None, new: Structure | None, firsts: tuple[dict, dict]) -> list[str]:
    """Describe the parts in which two structures differ; None is what was not given.

    Args:
        name: ``arg 2`` or ``"labels"``.
        firsts: first place of each tensor, see :func:`_first_names`.
    """
    if old == new:
        return []
    nothing = (None, ConstantLeaf(None))
    if isinstance(old, TensorLeaf) and isinstance(new, TensorLeaf):
        if firsts[0][old.index] == firsts[1][new.index]:
            return []
        return [f"{_input(name)} is another tensor than before among those given twice"]
    if isinstance(new, TensorLeaf) and old in nothing:
        return [f"{_input(name)} appeared"]
    if isinstance(old, TensorLeaf) and new in nothing:
        return [f"{_input(name)} disappeared"]
    if isinstance(old, NESTED) and isinstance(new, NESTED) and same_kind(old, new):
        before, after = dict(parts(old)), dict(parts(new))
        found = []
        for key in {**before, **after}:
            found += _differences(f"{name}{key}", before.get(key), after.get(key), firsts)
        return found
    if isinstance(old, ConstantLeaf) and isinstance(new, ConstantLeaf) and type(old.value) is type(new.value):
        return [f"{name}: {type(new.value).__name__} {described(old)} -> {described(new)}"]
    return [f"{name}: {described(old)} -> {described(new)}"]


def _input(name: str) -> str:
    return name if name.startswith("arg ") else f"input {name}"
