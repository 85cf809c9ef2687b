"""Cut a range of an output file into windows: the pieces to read, cast and write at a time. Reads and writes no file.

The source bytes of a window lie in one buffer in the order of the output, also if they come from several files. So a
window of any number of pieces takes one scan, one cast and one write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputEntry
from ort_zero.checkpoint.aggregation.aggregation_ranges import FileRange, overlapping
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.records import BUFFER, Piece

_ALIGNMENT = 8
"""Alignment in bytes of stretches in the buffer, which the widest dtype needs."""


class PieceRead(NamedTuple):
    """A part of a piece, and its place in the window's buffer."""

    entry: OutputEntry
    piece: Piece
    offset: int
    """Bytes from the start of the source file."""
    length: int
    """Number of bytes."""
    at: int
    """Bytes from the start of the buffer."""


class Stretch(NamedTuple):
    """Elements side by side in the buffer and in the output, with one dtype in the buffer and one in the output."""

    source: str
    """Dtype in the buffer."""
    dtype: str
    """Dtype in the output."""
    scan: bool
    """True for weights, of which NaN and inf are reported."""
    parts: list[tuple[OutputEntry, int, int]]
    """(tensor, first byte in the buffer, number of bytes in the buffer)."""

    @property
    def begin(self) -> int:
        """First byte in the buffer."""
        return self.parts[0][1]

    @property
    def end(self) -> int:
        """The byte after the last byte in the buffer."""
        return self.parts[-1][1] + self.parts[-1][2]


@dataclass(slots=True)
class Window:
    """The pieces that are read into one buffer at a time."""

    reads: list[PieceRead] = field(default_factory=list)
    """In the order of the output."""
    stretches: list[Stretch] = field(default_factory=list)
    """In the order of the output, in which one follows the other without a gap."""
    filled: int = 0
    """Bytes of the buffer that the window takes."""
    strided: bool = False
    """True for a single tensor that is not row-major, which is read whole at any size."""


def windows(part: FileRange, size: int) -> Iterator[Window]:
    """Yield the windows of a range in the order of the output.

    Args:
        part: range of an output file.
        size: maximum number of source bytes in a window, a multiple of 8; a tensor that is not row-major may have more.
    """
    window = Window()
    for index, low, high in overlapping(part):
        entry = part.file.entries[index]
        tensor = entry.tensor
        if tensor.strides is not None:
            if window.filled:
                yield window
            yield _strided(entry)
            window = Window()
            continue
        width, out_width = itemsize(tensor.dtype), itemsize(entry.dtype)
        position, end = low // out_width * width, high // out_width * width
        pieces = tensor.pieces
        number = bisect_right(pieces, position // width, key=lambda piece: piece.start) - 1 if position else 0
        while position < end:
            piece = pieces[number]
            begin = piece.start * width
            stop = min(begin + piece.length, end)
            while position < stop:
                at = window.filled
                if at % width:
                    at += -at % _ALIGNMENT
                length = min(stop - position, (size - at) // width * width)
                if length <= 0:
                    yield window
                    window = Window()
                    continue
                window.reads.append(PieceRead(entry, piece, piece.offset + position - begin, length, at))
                _extend(window, entry, at, length)
                window.filled = at + length
                position += length
            number += 1
    if window.filled:
        yield window


def _extend(window: Window, entry: OutputEntry, at: int, length: int) -> None:
    """Add bytes to the last stretch of a window, or begin another stretch."""
    tensor = entry.tensor
    if window.stretches:
        last = window.stretches[-1]
        other, begin, count = last.parts[-1]
        if begin + count == at:
            if other is entry:
                last.parts[-1] = (entry, begin, count + length)
                return
            if last.source == tensor.dtype and last.dtype == entry.dtype and last.scan == _is_scanned(entry):
                last.parts.append((entry, at, length))
                return
    window.stretches.append(Stretch(tensor.dtype, entry.dtype, _is_scanned(entry), [(entry, at, length)]))


def _strided(entry: OutputEntry) -> Window:
    (piece,) = entry.tensor.pieces
    read = PieceRead(entry, piece, piece.offset, piece.length, 0)
    stretch = Stretch(entry.tensor.dtype, entry.dtype, _is_scanned(entry), [(entry, 0, piece.length)])
    return Window([read], [stretch], piece.length, strided=True)


def _is_scanned(entry: OutputEntry) -> bool:
    return entry.tensor.kind != BUFFER and not entry.tensor.is_optimizer_state
