"""Compute how DeepSpeed lays parameters out in flat tensors, for a world size and a ZeRO stage.

ZeRO-1 and 2 cut the vector of a group's parameters equally over the ranks. ZeRO-3 cuts each parameter, and a rank's
cuts of a sub-group lie one after the other in one flat tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_ALIGNMENT = 2
"""ZeRO-1 and 2 pad the flat tensor of a parameter group to a multiple of this many elements per rank."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each parameter by its name."""


class Place(NamedTuple):
    """A range of elements of one parameter, and its place in a flat tensor."""

    name: str
    start: int
    """First element in the flattened parameter."""
    length: int
    """Number of elements."""
    offset: int
    """First element in the flat tensor."""


class FlatGroup(NamedTuple):
    """One flat tensor of one rank."""

    group: int
    """Number of the parameter group."""
    names: tuple[str, ...]
    """All parameters of the group (of the sub-group for ZeRO-3), with elements on any rank."""
    places: tuple[Place, ...]
    size: int
    """Number of elements, padding included."""
    padding: int
    """Number of padding elements behind the last parameter (ZeRO-1 and 2)."""


def places_between(parameters: Iterable[tuple[str, int, int]], first: int, end: int) -> tuple[Place, ...]:
    """Return the places of parameters (name, first element, elements) in a vector's part from `first` to `end`."""
    places = []
    for name, position, elements in parameters:
        low, high = max(position, first), min(position + elements, end)
        if low < high:
            places.append(Place(name, low - position, high - low, low - first))
    return tuple(places)


def zero12_group(
    number: int, names: Sequence[str], shapes: Shapes, part: int, parts: int, pads: Sequence[int] | None = None
) -> FlatGroup:
    """Return part number `part` of `parts` equal ones of a group's flat tensor; `pads` elements follow parameters."""
    parameters, total = [], 0
    for name, pad in zip(names, pads or [0] * len(names)):
        elements = math.prod(shapes[name])
        parameters.append((name, total, elements))
        total += elements + pad
    size = -(-total // (_ALIGNMENT * parts)) * _ALIGNMENT
    end = (part + 1) * size
    places = places_between(parameters, part * size, end)
    return FlatGroup(number, tuple(names), places, size, min(size, max(0, end - total)))


def zero3_group(number: int, names: Sequence[str], shapes: Shapes, rank: int, world_size: int) -> FlatGroup:
    """Return the flat tensor of a rank for one sub-group of parameter group `number` under ZeRO-3."""
    places, offset = [], 0
    for name in names:
        elements = math.prod(shapes[name])
        start, length = zero3_part(elements, rank, world_size)
        if length:
            places.append(Place(name, start, length, offset))
        offset += -(-elements // world_size)
    return FlatGroup(number, tuple(names), tuple(places), offset, 0)


def zero3_groups(
    groups: Sequence[Sequence[str]], shapes: Shapes, rank: int, world_size: int, sub_group_size: int
) -> list[FlatGroup]:
    """Return the flat tensors of a rank under ZeRO-3: one per sub-group, full from `sub_group_size` elements on."""
    flat_groups = []
    for number, names in enumerate(groups):
        members: list[str] = []
        size = 0
        for name in names:
            members.append(name)
            size += -(-math.prod(shapes[name]) // world_size)
            if size >= sub_group_size or name == names[-1]:
                flat_groups.append(zero3_group(number, members, shapes, rank, world_size))
                members, size = [], 0
    return flat_groups


def zero3_part(elements: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first element and the number of elements of a rank's part of a parameter under ZeRO-3."""
    part = -(-elements // world_size)
    start = min(rank * part, elements)
    return start, min(part, elements - start)
