"""Map trained parameters to their places in the flat tensors of the optimizer's files, and make pieces of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered
from ort_zero.checkpoint.format.flat_groups import FlatGroup
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor

Flats = Mapping[int, StoredTensor]
"""The flat tensors of one rank by number: of a parameter group, or of a sub-group for ZeRO-3."""


@dataclass
class FlatLayout:
    """The places of the trained parameters in the flat tensors of all ranks."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    """Number of the flat tensor (group, or sub-group for ZeRO-3) of each parameter."""
    groups: dict[tuple[int, int], FlatGroup] = field(default_factory=dict)
    """Places in each flat tensor by rank and by number in the rank's file."""

    def add(
        self, shapes: Mapping[str, tuple[int, ...]], number: int, groups: Mapping[tuple[int, int], FlatGroup]
    ) -> None:
        """Add parameters that lie in the flat tensors `groups`, which have that number."""
        self.shapes |= shapes
        self.number_of |= dict.fromkeys(shapes, number)
        self.groups |= groups


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
    present = {number for number in numbers if not _is_missing(files, kind, number, flats)}
    codes = {number: _same_code(files, kind, number, flats) for number in present}
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.shapes}
    for (rank, number), group in layout.groups.items():
        if number not in present:
            continue
        file, stored = files.optimizers[rank].file.name, flats[rank][number]
        size, elements = stored.itemsize, elements_of(stored.shape)
        for place in group.places:
            # a flat tensor that is too short leaves a gap, which the check of the tensor's pieces reports
            length = min(place.length, elements - place.offset)
            if length > 0:
                piece = Piece(file, stored.offset + place.offset * size, length * size, place.start)
                pieces[place.name].append(piece)
    for name, shape in layout.shapes.items():
        number = layout.number_of[name]
        if number in present:
            ordered = tuple(sorted(pieces[name], key=lambda piece: piece.start))
            tensor = Tensor(name=name, kind=kind, dtype=codes[number], shape=shape, pieces=ordered)
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
