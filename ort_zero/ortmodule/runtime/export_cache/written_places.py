"""Places outside of a call's arguments, and what was found there, as plain values that another process reads."""

from __future__ import annotations

from contextvars import ContextVar
from types import FunctionType
from typing import Any

from ort_zero.ortmodule.compat.frames import is_foreign, is_installed
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    CACHED,
    CALLABLE,
    CELL,
    CONTEXT,
    ENVIRONMENT,
    GLOBAL,
    MISSING,
    SETTING,
    Contents,
    FunctionState,
    Place,
    Snapshot,
    TensorState,
    is_plain,
    shown,
)
from ort_zero.ortmodule.runtime.export.attribute_writes import AttributeWrite
from ort_zero.ortmodule.runtime.export.functions_with_values import ITERATORS
from ort_zero.ortmodule.runtime.export.named_objects import lasting_name, name_of, object_with, value_named
from ort_zero.ortmodule.runtime.export_cache import serialization
from ort_zero.ortmodule.runtime.export_cache.described import Describer, file_of, qualified
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable
from ort_zero.ortmodule.runtime.export_cache.source_code import REPLACED_IN
from ort_zero.ortmodule.runtime.guards.attribute_guard import InputKind, ReadValues

_STATES = frozenset({FunctionState, InputKind, Snapshot, TensorState})
"""Types of values that are compared by what they hold."""


def written_attributes(read: ReadValues) -> dict[str, Any]:
    """Return what a graph was traced with as plain values.

    Raises:
        NotStorable: the key of an item has no lasting name, or of an object nobody can tell whether it is the same.
    """
    # what functions have cached is not there yet in another process
    places = [place for place in read.values if place in read.readers and place.steps[-1][0] != CACHED]
    describe = Describer()
    for place in places:
        value = read.values[place]
        kind = value.kind if isinstance(value, Contents) else type(value)
        if value is not MISSING and kind not in _STATES and (
            issubclass(kind, ITERATORS) if isinstance(value, Contents) else not describe.tells(value)
        ):  # fmt: skip
            why = f"the code reads {place.named(read.model)}, of which only the class can be compared"
            raise NotStorable(f"{why}: {qualified(kind)}")
    index = {place: i for i, place in enumerate(places)}
    return {
        "places": [(*written_place(place), list(read.readers[place]), text_of(place, read)) for place in places],
        "inputs": [(index[place], name) for place, name in read.inputs.items()],
        "whole": sorted(index[place] for place in read.whole if place in index),
        "kinds": sorted(index[place] for place in read.kinds if place in index),
    }


def written_place(place: Place) -> tuple:
    """Return a place as plain values.

    Raises:
        NotStorable: it starts at a function or an object that has a name in this process only.
    """
    root: tuple[str, str | None] = place.root
    if place.root[0] == CALLABLE:
        root = CALLABLE, lasting_name(value_named(place.root[1]))
    if root[1] is None:
        raise NotStorable(f"the code reads {place.named('')}, which has no lasting name")
    return root, [(kind, serialization.encode(key, "key")) for kind, key in place.steps]


def written_write(write: AttributeWrite) -> list[Any]:
    """Return what a forward writes as plain values."""
    return [
        written_place(write.place),
        write.how,
        serialization.encode(write.structure, "attribute"),
        list(write.tensors),
    ]


def read_write(written: list[Any]) -> AttributeWrite:
    """Return what :func:`written_write` wrote."""
    place, how, structure, tensors = written
    sources = tuple((str(source), int(index), bool(gradient)) for source, index, gradient in tensors)
    return AttributeWrite(read_place(*place), str(how), serialization.decode(structure), sources)


def read_place(root: list, steps: list) -> Place:
    """Return the place that :func:`written_place` wrote.

    Raises:
        ValueError: it starts at a function that this process does not have.
    """
    kind, name = root
    if kind == CALLABLE:
        value = object_with(name)
        if value is None:
            raise ValueError(f"there is no {name}")
        name = name_of(value)
    return Place((kind, name), tuple([(step, serialization.decode(key)) for step, key in steps]))


def text_of(place: Place, read: ReadValues) -> str | None:
    """Return a plain value that no other criterion holds: of a global, a context variable, a function's variables.

    The attributes of modules are part of the model's criterion, as they are before the module runs.

    Raises:
        NotStorable: it belongs to a function or an object that is found by its name, and cannot be compared.
    """
    value = read.values[place]
    if isinstance(value, FunctionState):
        if place.root[0] == GLOBAL and is_foreign(file_of(place.root[1]) or "") and place.root[1] not in REPLACED_IN:
            raise NotStorable(f"the program has replaced {place.named('')}")
        given = (value.defaults, value.keywords)
        if any(given) and is_plain(given):
            return f"{text_of_function(place, value.function)} {given!r}"
        return text_of_function(place, value.function)
    by_name = place.root[0] == CALLABLE or any(kind == CONTEXT for kind, _ in place.steps)
    if by_name and not is_plain(value):
        text = _text_of_object(value)
        if text is None:
            raise NotStorable(f"the code reads {place.named('')}, which is {shown(value)}")
        return text
    outside = by_name or place.root[0] in (GLOBAL, ENVIRONMENT, SETTING) or any(kind == CELL for kind, _ in place.steps)
    return repr(value) if outside and is_plain(value) else None


def text_of_function(place: Place, function: FunctionType) -> str | None:
    """Return what tells in every process whether a function is the same; None where other criteria do.

    Raises:
        NotStorable: it is found by its name, and is none of an installed package.
    """
    if place.root[0] != CALLABLE and all(kind != CONTEXT for kind, _ in place.steps):
        return None
    text = _text_of_object(function)
    if text is None:
        raise NotStorable(f"the code reads {place.named('')}, which is {shown(function)}")
    return text


def _text_of_object(value: Any) -> str | None:
    """Return what tells in every process whether a value that is no constant is the same; None if nothing does."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, ContextVar):
        return f"context variable {value.name}"  # its value has a place of its own
    if isinstance(value, Contents):
        return f"{value.kind.__qualname__} {value.keys!r}" if is_plain(value.keys) else None
    if isinstance(value, FunctionType) and is_installed(value.__code__.co_filename):
        return lasting_name(value)  # the version of its package is a criterion
    return None
