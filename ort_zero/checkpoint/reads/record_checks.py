"""Check records of ``torch.save``'s zip by the CRC-32 of parts, which any rank has read in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.records import File
from ort_zero.errors import CorruptCheckpointError
from ort_zero.utils.crc32 import crc32, crc32_combine


class Part(NamedTuple):
    """A range of bytes of a record that was read, with its CRC-32."""

    file: str
    record: int
    """Offset of the record in the file."""
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Number of bytes that were read."""
    crc: int


class RecordChecks:
    """The CRC-32s of the bytes that one thread reads; bytes that follow the last read extend its part.

    Args:
        files: the files of the checkpoint; files without records are not checked.
    """

    def __init__(self, files: Iterable[File]):
        self._records = {file.name: sorted(file.records) for file in files if file.records}
        self._starts = {name: [start for start, _, _ in records] for name, records in self._records.items()}
        self._last: dict[str, tuple[int, int, int]] = {}
        """The record of each file that was looked up last."""
        self._open: dict[tuple[str, int], Part] = {}
        self._closed: list[Part] = []

    def place_of(self, name: str, offset: int) -> tuple[int | None, int | None]:
        """Return the end of the record at byte `offset`, and the end of the bytes that were read of it before `offset`.

        Both are positions in the file; None without a record, or without earlier bytes.
        """
        record = self._record(name, offset)
        if record is None:
            return None, None
        part = self._open.get((name, record[0]))
        before = None if part is None or part.offset + part.length > offset else part.offset + part.length
        return record[0] + record[1], before

    def add(self, name: str, offset: int, views: Iterable[Any]) -> None:
        """Add bytes of one record that were read: `views`, one after the other from `offset` on."""
        record = self._record(name, offset)
        if record is None:
            return
        key = (name, record[0])
        part = self._open.get(key)
        begin, crc, position = offset, 0, offset
        if part is not None:
            if part.offset + part.length == offset:
                begin, crc = part.offset, part.crc
            else:
                self._closed.append(part)
        for view in views:
            crc = crc32(view, crc)
            position += len(view)
        self._open[key] = Part(name, record[0], begin, position - begin, crc)

    def parts(self) -> list[Part]:
        """Return the parts that were read."""
        return [*self._closed, *self._open.values()]

    def _record(self, name: str, offset: int) -> tuple[int, int, int] | None:
        last = self._last.get(name)
        if last is not None and last[0] <= offset < last[0] + last[1]:
            return last
        starts = self._starts.get(name)
        if starts is None:
            return None
        index = bisect_right(starts, offset) - 1
        if index < 0:
            return None
        record = self._records[name][index]
        if offset >= record[0] + record[1]:
            return None
        self._last[name] = record
        return record


def check_record(source: Folder, file: File, record: tuple[int, int, int], parts: Iterable[Part]) -> None:
    """Compare one record with its CRC-32, reading only the bytes that no part covers.

    Raises:
        CorruptCheckpointError: the CRC-32 differs.
    """
    start, length, wanted = record
    position, crc = start, 0
    for part in sorted(set(parts), key=lambda p: (p.offset, -p.length)):
        if part.offset < position:
            continue  # an overlap; its bytes beyond the last part are read again as a gap
        crc = _crc_of_gap(source, file.name, position, part.offset, crc)
        crc = crc32_combine(crc, part.crc, part.length)
        position = part.offset + part.length
    crc = _crc_of_gap(source, file.name, position, start + length, crc)
    if crc != wanted:
        raise CorruptCheckpointError(
            f"{source.path(file.name)} is damaged: bytes {start} to {start + length}: their CRC-32 is {crc:08x}, "
            f"not {wanted:08x}"
        )


def _crc_of_gap(source: Folder, name: str, start: int, end: int, crc: int) -> int:
    while start < end:
        block = source.read(name, start, min(CHUNK, end - start))
        crc = crc32(block, crc)
        start += len(block)
    return crc
