"""Check records of ``torch.save``'s zip by the CRC-32 of parts, which any rank has read in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from isal.isal_zlib import crc32, crc32_combine

from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Checksum, File
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CorruptCheckpointError


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
    """The CRC-32s of the bytes that were read; bytes that follow the last read of a record extend its part."""

    def __init__(self, files: Iterable[File]):
        self._records = {file.name: sorted(file.records) for file in files if file.records}
        self._open: dict[tuple[str, int], Part] = {}
        self._closed: list[Part] = []

    def add(self, name: str, offset: int, view: memoryview) -> None:
        """Add bytes of a file that were read from `offset` on."""
        records, end = self._records.get(name, ()), offset + len(view)
        for index in range(max(0, bisect_right(records, (offset, 1 << 63)) - 1), len(records)):
            start, length, _ = records[index]
            low, high = max(offset, start), min(end, start + length)
            if start >= end:
                break
            if low >= high:
                continue
            part = self._open.get((name, start))
            if part is not None and part.offset + part.length == low:
                low_of_part, crc = part.offset, part.crc
            else:
                low_of_part, crc = low, 0
                if part is not None:
                    self._closed.append(part)
            crc = crc32(view[low - offset : high - offset], crc)
            self._open[name, start] = Part(name, start, low_of_part, high - low_of_part, crc)

    def parts(self) -> list[Part]:
        """Return the parts that were read."""
        return [*self._closed, *self._open.values()]


def check_records_of(folder: Folder, files: Mapping[str, File], parts: list[Part], ranks: RankGroup) -> None:
    """Check each record of which any rank has read a part, shared among the ranks. All ranks must call.

    Raises:
        CorruptCheckpointError: a record has another CRC than at the save.
        RankError: another rank checked a damaged record.
    """
    if not any(file.records for file in files.values()):
        return  # in this format the pieces have checksums
    read: dict[tuple[str, int], list[Part]] = {}
    for part in (part for some in ranks.gather(parts) for part in some):
        read.setdefault((part.file, part.record), []).append(part)
    with ranks.raise_on_all("checking the records that were read"):
        for number, (name, start) in enumerate(sorted(read)):
            if number % ranks.size == ranks.rank:
                record = next(r for r in files[name].records if r[0] == start)
                check_record(folder, files[name], record, read[name, start])


def check_record(source: Folder, file: File, record: Checksum, parts: Iterable[Part]) -> None:
    """Compare one record with its CRC-32, reading only the bytes that no part covers."""
    start, length, wanted = record
    position, crc = start, 0
    for part in sorted(set(parts), key=lambda p: (p.offset, -p.length)):
        if part.offset < position:
            continue  # an overlap; its bytes beyond the last part are read again as a gap
        crc = source.crc32(file.name, position, part.offset, crc)
        crc = crc32_combine(crc, part.crc, part.length)
        position = part.offset + part.length
    crc = source.crc32(file.name, position, start + length, crc)
    if crc != wanted:
        raise CorruptCheckpointError(
            f"{source.path(file.name)} is damaged: bytes {start} to {start + length}: their CRC-32 is {crc:08x}, "
            f"not {wanted:08x}"
        )
