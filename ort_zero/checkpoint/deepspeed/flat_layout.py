"""Map trained parameters to their places in the flat tensors of the optimizer's files, and cut them into pieces."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered
from ort_zero.checkpoint.records import File, Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor

Flats = Mapping[int, StoredTensor]
"""The flat tensors of one rank by number: of a parameter group, or of a sub-group for ZeRO-3."""


@dataclass(frozen=True)
class ElementRange:
    """A range of a parameter: elements `begin` to `end` of vector number `vector` are its elements from `first` on."""

    vector: int
    begin: int
    end: int
    first: int


@dataclass
class FlatLayout:
    """The places of the trained parameters in vectors, which consist of flat tensors, one after the other."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: dict[str, list[ElementRange]] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    """Number of the flat tensor (group, or sub-group for ZeRO-3) of each parameter."""
    lengths: list[list[int]] = field(default_factory=list)
    """Number of elements of each flat tensor of each vector; for ZeRO-1 and 2 without the padding at the end."""
    parts: list[list[tuple[int, int]]] = field(default_factory=list)
    """(rank, number of the flat tensor) of each part of each vector."""
    saved_names: dict[str, str] = field(default_factory=dict)
    """Name of each parameter in the ranks' files, which number the experts of each rank from 0."""

    def add(self, name: str, shape: tuple[int, ...], number: int, ranges: list[ElementRange], saved_as: str) -> None:
        """Add a parameter that lies in the flat tensors with that number."""
        self.shapes[name], self.number_of[name] = shape, number
        self.ranges[name], self.saved_names[name] = ranges, saved_as


class _Part(NamedTuple):
    """A flat tensor that is a part of a longer vector."""

    file: File
    stored: StoredTensor

    @property
    def elements(self) -> int:
        return math.prod(self.stored.shape)


class _Vector:
    """A vector of flat tensors, one after the other.

    Args:
        parts: the flat tensors, None for a missing one.
        lengths: number of elements of the vector for each part; the part itself may have fewer or more.
    """

    def __init__(self, parts: list[_Part | None], lengths: list[int]):
        self._ends = list(accumulate(lengths))
        self._starts = [0, *self._ends]
        self._parts = [
            None if part is None else (part.file.name, part.stored.offset, part.stored.itemsize, part.elements)
            for part in parts
        ]

    def cut(self, begin: int, end: int, first: int) -> list[Piece]:
        """Return the pieces of the elements `begin` to `end`, which are a tensor's elements from `first` on."""
        pieces: list[Piece] = []
        index = bisect_right(self._ends, begin)
        while begin < end and index < len(self._parts):
            part = self._parts[index]
            if part is None:
                break
            name, offset, size, elements = part
            start, wanted = self._starts[index], self._ends[index]
            if end < wanted:  # no min(): this runs for each piece of a checkpoint
                wanted = end
            stop = start + elements
            if wanted < stop:
                stop = wanted
            if stop > begin:
                pieces.append(Piece(name, offset + (begin - start) * size, (stop - begin) * size, first))
                first, begin = first + stop - begin, stop
            if stop < wanted:
                break  # a gap, which the check of the tensor's pieces reports
            index += 1
        return pieces


def flat_tensors(files: StateFiles, layout: FlatLayout, kind: str, flats: list[Flats]) -> Iterator[Tensor]:
    """Yield the tensor of `kind` of each parameter that has such a tensor.

    Args:
        files: files of the checkpoint.
        layout: places of the parameters.
        kind: :data:`~ort_zero.checkpoint.records.MASTER` or the name of an optimizer state.
        flats: flat tensors of each rank; a missing tensor has no entry.

    Raises:
        CorruptCheckpointError: a flat tensor is too short, or missing or of another dtype on some ranks.
        CheckpointError: a dtype is unknown.
    """
    numbers = set(layout.number_of.values())
    missing = {number for number in numbers if _is_missing(files, kind, number, flats)}
    vectors = []
    for lengths, numbers_by_rank in zip(layout.lengths, layout.parts):
        parts = [
            None if number in missing else _Part(files.optimizers[rank].file, flats[rank][number])
            for rank, number in numbers_by_rank
        ]
        vectors.append(_Vector(parts, lengths))
    codes = {number: _same_code(files, kind, number, flats) for number in numbers - missing}
    for name, shape in layout.shapes.items():
        number = layout.number_of[name]
        if number not in missing:
            pieces = [q for r in layout.ranges[name] for q in vectors[r.vector].cut(r.begin, r.end, r.first)]
            tensor = Tensor(name=name, kind=kind, dtype=codes[number], shape=shape, pieces=tuple(pieces))
            yield covered(tensor, files.folder.path())


def _same_code(files: StateFiles, kind: str, number: int, flats: list[Flats]) -> str:
    """Return the dtype's code of one flat tensor, which must be the same on all ranks."""
    what = f"{kind} of group {number}"
    codes = {file: files.dtype_code(file, flat[number], what) for file, flat in zip(files.optimizers, flats)}
    files.check_same(f"dtype of {what}", codes)
    return next(iter(codes.values()))


def _is_missing(files: StateFiles, kind: str, number: int, flats: list[Flats]) -> bool:
    """Return True if no rank has the flat tensor; raise CorruptCheckpointError if only some ranks have it."""
    present = [number in flat for flat in flats]
    if any(present) and not all(present):
        raise files.foreign(
            files.optimizers[present.index(False)],
            f"it has no {kind} of group {number}, but rank {present.index(True)}'s file has one",
        )
    return not any(present)


def elements_of(shape: Any) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
