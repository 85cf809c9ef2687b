"""Hold the pieces of a tensor in a compact form, in memory and as rows of ``manifest.json``; find and check pieces.

Under ZeRO-3 every rank stores an equal part of each tensor at the same offset of its file. These pieces differ only in
their checksums. A run stands for such pieces: it stores the checksums as bytes, and makes a piece when it is accessed.
A model with 405 billion parameters on 512 ranks has 1.7 million pieces, which would take Python more than half a
gigabyte.
"""

from __future__ import annotations

import abc
import base64
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.records import File, Piece, Tensor

CHECK_BYTES = 8
"""Bytes of an xxh3-64."""


class PieceRun(NamedTuple):
    """Pieces of equal length that follow each other in a tensor; a row of the manifest, with checksums in base64."""

    file: int
    """Index of the first piece's file among the files of the checkpoint."""
    offset: int  # bytes from the start of each file
    length: int  # bytes of each piece
    start: int
    """Index of the first piece's first element in the flattened tensor."""
    checks: bytes
    """The xxh3-64 of each piece, one after the other."""
    pieces: int = 1
    step: int = 1
    """Difference of the file indices of two neighbouring pieces."""

    def files(self) -> range:
        return range(self.file, self.file + self.pieces * self.step, self.step)


class LazyPieces(Sequence[Piece]):
    """The pieces of one tensor, each made when it is accessed; a subclass has ``__len__`` and :meth:`piece_at`."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError("piece index out of range")
        return self.piece_at(index)

    @abc.abstractmethod
    def piece_at(self, index: int) -> Piece:
        """Return the piece at `index`, from 0 on."""


class PieceRuns(LazyPieces):
    """The pieces that the runs of one tensor stand for. Equal to a tuple of the same pieces."""

    __slots__ = ("_ends", "_names", "_size", "runs")

    def __init__(self, names: Sequence[str], runs: Sequence[PieceRun], dtype: str):
        self.runs = tuple(sorted(runs, key=lambda run: run.start))
        self._names = names
        self._size = itemsize(dtype)
        self._ends = tuple(accumulate(run.pieces for run in self.runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Piece]:
        return (self.piece(run, number) for run in self.runs for number in range(run.pieces))

    def piece_at(self, index: int) -> Piece:
        number = bisect_right(self._ends, index)
        return self.piece(self.runs[number], index - (self._ends[number - 1] if number else 0))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sequence) and tuple(self) == tuple(other))

    def __hash__(self) -> int:
        return hash(self.runs)

    def piece(self, run: PieceRun, number: int) -> Piece:
        """Return piece `number` of a run, counted from 0."""
        check = run.checks[number * CHECK_BYTES : (number + 1) * CHECK_BYTES]
        start = run.start + number * (run.length // self._size)
        return Piece(self._names[run.file + number * run.step], run.offset, run.length, start, check)


def add_piece(runs: list[PieceRun], piece: PieceRun, size: int) -> None:
    """Add a run of one piece to the runs of a tensor with `size` bytes an element, or extend the last run by it."""
    if runs:
        last = runs[-1]
        step = piece.file - last.file if last.pieces == 1 else last.step
        follows = piece.start == last.start + last.pieces * (last.length // size) and step > 0
        if follows and piece[1:3] == last[1:3] and piece.file == last.file + last.pieces * step:
            runs[-1] = last._replace(checks=last.checks + piece.checks, pieces=last.pieces + 1, step=step)
            return
    runs.append(piece)


def rows_of(pieces: Sequence[Piece], index: Mapping[str, int]) -> list[list[Any]]:
    """Return the manifest's rows for the pieces of one tensor; `index` has the place of each file in its list."""
    if isinstance(pieces, PieceRuns):
        runs: Sequence[PieceRun] = pieces.runs
    else:
        runs = [PieceRun(index[p.file], p.offset, p.length, p.start, p.check or b"") for p in pieces]
    return [[*run[:4], base64.b64encode(run.checks).decode(), run.pieces, run.step] for run in runs]


def run_of(row: Sequence[Any], files: int) -> PieceRun:
    """Return the run of a row of the manifest that lists `files` files; TypeError or IndexError for a wrong row."""
    file, offset, length, start, checks, count, step = row
    if any(type(number) is not int or number < 0 for number in (file, offset, length, start)):
        raise TypeError("file, offset, length and first element must be whole numbers, 0 or more")
    if any(type(number) is not int or number < 1 for number in (count, step)):
        raise TypeError("number of pieces and step must be whole numbers, 1 or more")
    try:
        data = base64.b64decode(checks if isinstance(checks, str) else "!", validate=True)
    except ValueError:
        raise TypeError("the checksums must be base64") from None
    if len(data) != count * CHECK_BYTES:
        raise TypeError(f"the checksums of {count} pieces take {count * CHECK_BYTES} bytes, not {len(data)}")
    if file + (count - 1) * step >= files:
        raise IndexError(f"the last of {count} pieces is in no file that is listed")
    return PieceRun(file, offset, length, start, data, count, step)


def first_and_count(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Yield each run of pieces as its first piece and its number of pieces; a plain piece is a run of one."""
    if isinstance(pieces, PieceRuns):
        return ((pieces.piece(run, 0), run.pieces) for run in pieces.runs)
    return ((piece, 1) for piece in pieces)


def check_cover(tensor: Tensor) -> str | None:
    """Return the fault in the pieces of `tensor` (a gap, an overlap, a wrong length), None if they cover the tensor."""
    size = itemsize(tensor.dtype)
    if tensor.strides is not None:
        return None if len(tensor.pieces) == 1 else "a strided tensor must lie in one piece"
    position = 0
    for piece, count in first_and_count(tensor.pieces):
        if piece.length % size:
            return f"the piece in {piece.file} has {piece.length} bytes, not a multiple of {size}"
        if piece.start > position:
            return f"elements {position} to {piece.start} are in no file"
        if piece.start < position:
            return f"elements from {piece.start} are in two pieces, the second in {piece.file}"
        position += count * (piece.length // size)
    if position != tensor.elements:
        return f"the pieces hold {position} elements, the shape {list(tensor.shape)} has {tensor.elements}"
    return None


def check_extents(files: Sequence[File], tensors: Sequence[Tensor]) -> str | None:
    """Return a message on a piece outside of its file, or on a file with fewer bytes than the tensors claim, else None.

    Without this check a small file could be read again and again into an output of any size.
    """
    claimed: Counter[range] = Counter()
    for tensor in tensors:
        assert isinstance(tensor.pieces, PieceRuns), "the manifest's reader makes runs"
        for run in tensor.pieces.runs:
            claimed[run.files()] += run.length
            shortest = min((files[number] for number in run.files()), key=lambda file: file.size)
            if run.offset + run.length > shortest.size:
                return f"{tensor.kind} of {tensor.name}: a piece lies outside {shortest.name}"
    of_file: Counter[int] = Counter()
    for numbers, length in claimed.items():
        of_file.update(dict.fromkeys(numbers, length))
    for number, length in of_file.items():
        if length > files[number].size:
            return f"the tensors claim {length} bytes of {files[number].name}, which has {files[number].size}"
    return None


def overlaps(tensor: Tensor, start: int, length: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield (piece, first element in the piece, number of elements) for each piece that overlaps a range."""
    size, end = itemsize(tensor.dtype), start + length
    pieces = tensor.pieces
    first_index = max(0, bisect_left(pieces, start, key=lambda piece: piece.start) - 1)
    for number in range(first_index, len(pieces)):
        piece = pieces[number]
        if piece.start >= end:
            break
        first, last = max(piece.start, start), min(piece.start + piece.length // size, end)
        if first < last:
            yield piece, first - piece.start, last - first
