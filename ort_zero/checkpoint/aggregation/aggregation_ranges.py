"""Divides the files of an aggregation among ranks and threads, by ranges of bytes. Pure: reads and writes nothing.

Where several may write into one file (a local file system) a file is cut, so that a single output file keeps all ranks
and cores busy. The cuts lie at multiples of :data:`ALIGNMENT` in the file, so that no two ranks write the same page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile

ALIGNMENT = 1 << 20
"""Bytes: cuts lie at multiples of it in the output file. A multiple of every element's size."""


class FileRange(NamedTuple):
    """A part of an output file for one writer."""

    file: OutputFile
    begin: int
    """First byte in the file; 0 means that the header belongs to the part."""
    end: int
    """The byte after the last one."""


def shares(files: Sequence[OutputFile], count: int) -> list[list[FileRange]]:
    """Return `count` lists of ranges that together cover all bytes of `files` once, of about equal size.

    The ranges of a list follow each other. The same on every rank.
    """
    total = sum(file.size for file in files)
    cuts = [total * number // count for number in range(1, count)]
    found: list[list[FileRange]] = [[] for _ in range(count)]
    start = 0
    for file in files:
        inside = [_cut(file, cut - start) if cut > start else 0 for cut in cuts]
        borders = [0, *(min(max(border, 0), file.size) for border in inside), file.size]
        for number, (begin, end) in enumerate(zip(borders, borders[1:])):
            if end > begin:
                found[number].append(FileRange(file, begin, end))
        start += file.size
    return found


def _cut(file: OutputFile, position: int) -> int:
    """Return where to cut a file that would be cut at `position`."""
    if position >= file.size:
        return file.size
    aligned = position // ALIGNMENT * ALIGNMENT
    data = aligned - len(file.header)
    if data <= 0:
        return 0
    entry = file.entries[bisect_right(file.entries, data, key=lambda e: e.offset) - 1]
    if entry.tensor.strides is not None:  # it is read whole, by the writer of its begin
        return len(file.header) + entry.offset
    return aligned


def overlapping(part: FileRange) -> Iterator[tuple[int, int, int]]:
    """Yield (index of an entry, first and last byte + 1 in the entry's output) of what lies in a range, in order."""
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
