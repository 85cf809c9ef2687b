"""Divide the output files of an aggregation among ranks and threads, as byte ranges. Reads and writes no file.

On a local file system several ranks can write into one file. There a file is cut, so that a single output file keeps
all ranks and cores busy. Cuts lie at multiples of :data:`ALIGNMENT`, so that no two ranks write the same page.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputEntry, OutputFile
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.records import Piece

ALIGNMENT = 1 << 20
"""Cuts lie at multiples of this many bytes in the output file; a multiple of every element's size."""
BORDER_ALIGNMENT = 64 << 10
"""The same in bytes for a cut near the border of a piece; the largest memory page of any system."""


class FileRange(NamedTuple):
    """A byte range of an output file, for one writing thread."""

    file: OutputFile
    begin: int
    """First byte in the file; a range from byte 0 includes the header."""
    end: int
    """The byte after the last byte of the range."""
    cuts: tuple[int, ...] = ()
    """Bytes at which the file is cut for all of its writers, in order, without the file's begin and end."""


def shares(files: Sequence[OutputFile], count: int, slack: int = 0) -> list[list[FileRange]]:
    """Return `count` lists of ranges that together cover all bytes of `files` once, of about equal size.

    The ranges of a list follow each other. All ranks get the same result.

    Args:
        files: the output files.
        count: number of writers.
        slack: bytes by which a cut may move to the border of a piece: a cut inside a piece makes bytes be read twice.
    """
    total = sum(file.size for file in files)
    cuts = [total * number // count for number in range(1, count)]
    ranges: list[list[FileRange]] = [[] for _ in range(count)]
    start = 0
    for file in files:
        inside = list(accumulate((_cut(file, cut - start, slack) if cut > start else 0 for cut in cuts), max))
        borders = [0, *(min(max(border, 0), file.size) for border in inside), file.size]
        inner_cuts = tuple(sorted({border for border in borders if 0 < border < file.size}))
        for number, (begin, end) in enumerate(zip(borders, borders[1:])):
            if end > begin:
                ranges[number].append(FileRange(file, begin, end, inner_cuts))
        start += file.size
    return ranges


def is_checked_in(part: FileRange, entry: OutputEntry, piece: Piece) -> bool:
    """Return True if the writer of `part` checks the piece's checksum: its range has the largest part of the piece."""
    begin, end = _span(part.file, entry, piece)
    cuts = part.cuts[bisect_right(part.cuts, begin) : bisect_left(part.cuts, end)]
    borders = [begin, *cuts, end]
    low, high = max(zip(borders, borders[1:]), key=lambda pair: pair[1] - pair[0])
    return part.begin <= low and high <= part.end


def _span(file: OutputFile, entry: OutputEntry, piece: Piece) -> tuple[int, int]:
    """Return the first byte of a piece in the output file, and the byte after its last byte."""
    width, out_width = itemsize(entry.tensor.dtype), itemsize(entry.dtype)
    begin = len(file.header) + entry.offset + piece.start * out_width
    return begin, begin + piece.length // width * out_width


def _cut(file: OutputFile, position: int, slack: int) -> int:
    """Return the aligned byte at which to cut a file near `position`."""
    if position >= file.size:
        return file.size
    aligned = position // ALIGNMENT * ALIGNMENT
    if slack:
        border = _nearest_border(file, position)
        if abs(border - position) <= slack:
            aligned = (border + BORDER_ALIGNMENT // 2) // BORDER_ALIGNMENT * BORDER_ALIGNMENT
    if aligned >= file.size:
        return file.size
    data = aligned - len(file.header)
    if data <= 0:
        return 0
    entry = _entry_at(file, data)
    if entry.tensor.strides is not None:  # a strided tensor is read whole, by the writer of its first byte
        return len(file.header) + entry.offset
    return aligned


def _nearest_border(file: OutputFile, position: int) -> int:
    """Return the begin or end of a piece that is nearest to byte `position` of a file."""
    data = position - len(file.header)
    if data <= 0:
        return len(file.header)
    entry = _entry_at(file, data)
    pieces = entry.tensor.pieces
    if not pieces:
        return len(file.header) + entry.offset
    element = (data - entry.offset) // itemsize(entry.dtype)
    piece = pieces[max(0, bisect_right(pieces, element, key=lambda piece: piece.start) - 1)]
    return min(_span(file, entry, piece), key=lambda border: abs(border - position))


def _entry_at(file: OutputFile, data: int) -> OutputEntry:
    """Return the entry with byte `data` of the data section."""
    return file.entries[bisect_right(file.entries, data, key=lambda e: e.offset) - 1]


def overlapping(part: FileRange) -> Iterator[tuple[int, int, int]]:
    """Yield (index, begin, end) of each entry in a range, in order; begin and end are bytes in the entry's output."""
    file = part.file
    begin, end = part.begin - len(file.header), part.end - len(file.header)
    first = max(0, bisect_right(file.entries, begin, key=lambda e: e.offset) - 1)
    for index in range(first, len(file.entries)):
        entry = file.entries[index]
        low, high = max(begin, entry.offset), min(end, entry.offset + entry.nbytes)
        if entry.offset >= end:
            return
        if low < high:
            yield index, low - entry.offset, high - entry.offset
