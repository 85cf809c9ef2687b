"""Store the pieces of a tensor in a compact form, in memory and as rows of ``manifest.json``.

Under ZeRO-3 every rank stores an equal part of each tensor at the same offset of its file. These pieces differ only in
their checksums. A run stands for such pieces: it stores the checksums as bytes, and makes a piece when it is accessed.
A model with 405 billion parameters on 512 ranks has 1.7 million pieces, which would take Python more than half a
gigabyte.
"""

from __future__ import annotations

import base64
import binascii
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, overload

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.records import File, Piece, Tensor

CHECK_BYTES = 8
"""Bytes of an xxh3-64, most significant byte first, as in the hex digits."""
_MIN_PIECES_PER_ROW = 8
"""Minimum number of pieces that one row stands for; fewer pieces get a row each."""
_CHECK = re.compile("[0-9a-f]{16}")
_PLAIN, _RUN = 5, 7
"""Number of values in a row for one piece, and in a row for several pieces."""


class PieceRun(NamedTuple):
    """Pieces of equal length that follow each other in a tensor."""

    file: int
    """Index of the first piece's file among the files of the checkpoint."""
    offset: int
    """Bytes from the start of each file."""
    length: int
    """Length of each piece in bytes."""
    start: int
    """Index of the first piece's first element in the flattened tensor."""
    checks: bytes
    """The xxh3-64 of each piece, one after the other."""
    pieces: int = 1
    """Number of pieces."""
    step: int = 1
    """Difference of the file indices of two neighbouring pieces."""

    def files(self) -> range:
        """Return the indices of the files in which the pieces lie, in their order."""
        return range(self.file, self.file + self.pieces * self.step, self.step)


class PieceRuns(Sequence[Piece]):
    """The pieces of one tensor, each made when it is accessed. Equal to a tuple of the same pieces.

    Args:
        names: names of the checkpoint's files.
        runs: the runs in the order of their first elements.
        dtype: the tensor's dtype, as its code in safetensors.
    """

    __slots__ = ("_ends", "_names", "_size", "runs")

    def __init__(self, names: Sequence[str], runs: Sequence[PieceRun], dtype: str):
        self.runs = tuple(runs)
        self._names = names
        self._size = itemsize(dtype)
        self._ends = tuple(accumulate(run.pieces for run in self.runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Piece]:
        return (self.piece(run, number) for run in self.runs for number in range(run.pieces))

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError("piece index out of range")
        number = bisect_right(self._ends, index)
        return self.piece(self.runs[number], index - (self._ends[number - 1] if number else 0))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sequence) and tuple(self) == tuple(other))

    def __hash__(self) -> int:
        return hash(self.runs)

    def piece(self, run: PieceRun, number: int) -> Piece:
        """Return piece `number` of a run, counted from 0."""
        check = run.checks[number * CHECK_BYTES : (number + 1) * CHECK_BYTES].hex()
        start = run.start + number * (run.length // self._size)
        return Piece(self._names[run.file + number * run.step], run.offset, run.length, start, check)


class RunCollector:
    """The pieces of one tensor as the ranks report them, joined into runs.

    Args:
        dtype: the tensor's dtype, as its code in safetensors.
    """

    __slots__ = ("_checks", "_runs", "_size")

    def __init__(self, dtype: str):
        self._size = itemsize(dtype)
        self._runs: list[PieceRun] = []
        self._checks: list[bytearray] = []

    def add(self, file: int, offset: int, length: int, start: int, check: bytes) -> None:
        """Add a piece; the arguments are the fields of :class:`PieceRun`."""
        if self._runs:
            last = self._runs[-1]
            step = file - last.file if last.pieces == 1 else last.step
            follows = start == last.start + last.pieces * (last.length // self._size)
            if follows and (offset, length) == last[1:3] and step > 0 and file == last.file + last.pieces * step:
                self._runs[-1] = last._replace(pieces=last.pieces + 1, step=step)
                self._checks[-1] += check
                return
        self._runs.append(PieceRun(file, offset, length, start, b""))
        self._checks.append(bytearray(check))

    def pieces(self, names: Sequence[str], dtype: str) -> PieceRuns:
        """Return the pieces in the order of their first elements."""
        runs = [run._replace(checks=bytes(checks)) for run, checks in zip(self._runs, self._checks)]
        return PieceRuns(names, sorted(runs, key=lambda run: run.start), dtype)


def rows_of(pieces: Sequence[Piece], index: Mapping[str, int]) -> list[list[Any]]:
    """Return the manifest's rows for the pieces of one tensor.

    Args:
        pieces: pieces of the tensor.
        index: index in the manifest's file list by file name.
    """
    if not isinstance(pieces, PieceRuns):
        return [[index[p.file], p.offset, p.length, p.start, p.check] for p in pieces]
    rows: list[list[Any]] = []
    for run in pieces.runs:
        if run.pieces >= _MIN_PIECES_PER_ROW:
            checks = base64.b64encode(run.checks).decode()
            rows.append([run.file, run.offset, run.length, run.start, checks, run.pieces, run.step])
        else:
            rows += rows_of([pieces.piece(run, number) for number in range(run.pieces)], index)
    return rows


def pieces_of(rows: Sequence[list[Any]], names: Sequence[str], dtype: str) -> PieceRuns:
    """Return the pieces of one tensor from its rows, in the order of their first elements.

    Args:
        rows: rows of the tensor.
        names: names of the files that the manifest lists.
        dtype: dtype of the tensor, as its code in safetensors.

    Raises:
        TypeError: a row has another form.
        IndexError: a row names a file that is not listed.
    """
    if any(len(row) not in (_PLAIN, _RUN) for row in rows):
        raise TypeError(f"a row has {max(map(len, rows))} values, which this version of the format does not know")
    return PieceRuns(names, sorted((_run(names, *row) for row in rows), key=lambda run: run.start), dtype)


def _run(
    names: Sequence[str],
    file: Any,
    offset: Any,
    length: Any,
    start: Any,
    checks: Any,
    count: Any = None,
    step: Any = 1,
) -> PieceRun:
    """Return the run of a row; without `count` it has one piece; raise like :func:`pieces_of`."""
    _refuse_other_numbers(file, offset, length, start)
    if count is None:
        if not (isinstance(checks, str) and _CHECK.fullmatch(checks)):
            raise TypeError("the checksum must be 16 hex digits")
        data, count = bytes.fromhex(checks), 1
    else:
        if any(type(number) is not int or number < 1 for number in (length, count, step)):
            raise TypeError("length, number of pieces and step must be whole numbers, 1 or more")
        data = _from_base64(checks)
    if len(data) != count * CHECK_BYTES:
        raise TypeError(f"the checksums of {count} pieces take {count * CHECK_BYTES} bytes, not {len(data)}")
    if file + (count - 1) * step >= len(names):
        raise IndexError(f"the last of {count} pieces is in no file that is listed")
    return PieceRun(file, offset, length, start, data, count, step)


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "!", validate=True)
    except (ValueError, binascii.Error):
        raise TypeError("the checksums of several pieces must be base64") from None


def _refuse_other_numbers(*numbers: Any) -> None:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("file, offset, length and first element must be whole numbers, 0 or more")


def first_and_count(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Yield each run of pieces as its first piece and its number of pieces; a plain piece is a run of one."""
    if isinstance(pieces, PieceRuns):
        for run in pieces.runs:
            yield pieces.piece(run, 0), run.pieces
    else:
        for piece in pieces:
            yield piece, 1


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


def index_at(pieces: Sequence[Piece], element: int) -> int:
    """Return the index of the last piece that begins before `element`, 0 if no piece begins before."""
    return max(0, bisect_left(pieces, element, key=lambda piece: piece.start) - 1)


class PiecesByFile:
    """The pieces of a checkpoint of ort_zero by file, without all pieces in memory.

    Args:
        files: the checkpoint's files, in the order of the file indices of runs.
        tensors: the tensors of the checkpoint.
    """

    def __init__(self, files: Iterable[File], tensors: Iterable[Tensor]):
        self._files = list(files)
        self._index = {file.name: number for number, file in enumerate(self._files)}
        self._runs: dict[range, list[tuple[Tensor, PieceRuns, PieceRun]]] = {}
        for tensor in tensors:
            assert isinstance(tensor.pieces, PieceRuns), "the manifest's reader makes runs"
            for run in tensor.pieces.runs:
                self._runs.setdefault(run.files(), []).append((tensor, tensor.pieces, run))

    def of(self, name: str) -> list[tuple[Tensor, Piece]]:
        """Return the non-empty pieces in the file `name`, with their tensors, in the order of the file."""
        matches = []
        for files, items in self._runs.items():
            if self._index[name] in files:
                number = files.index(self._index[name])
                matches += [(tensor, pieces.piece(run, number)) for tensor, pieces, run in items if run.length]
        matches.sort(key=lambda item: item[1].offset)
        return matches

    def wrong_extent(self) -> str | None:
        """Return a message on a piece outside of its file, or on a file with fewer bytes than the tensors claim.

        Without this check a small file could be read again and again into an output of any size.
        """
        claimed: Counter[int] = Counter()
        for files, items in self._runs.items():
            shortest = min((self._files[number] for number in files), key=lambda file: file.size)
            for tensor, _, run in items:
                if run.offset + run.length > shortest.size:
                    return f"{tensor.kind} of {tensor.name}: a piece lies outside {shortest.name}"
            length = sum(run.length for _, _, run in items)
            claimed.update(dict.fromkeys(files, length))
        for number, length in claimed.items():
            if length > self._files[number].size:
                file = self._files[number]
                return f"the tensors claim {length} bytes of {file.name}, which has {file.size}"
        return None
