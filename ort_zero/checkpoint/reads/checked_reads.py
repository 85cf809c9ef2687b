"""Read ranges of stored tensors into memory, each byte once, and compare the bytes with their checksums.

Neighbouring ranges of a file are read together. A piece with its own checksum is read whole, since the checksum covers
the whole piece; its other bytes may be kept for the next read. Where a format has checksums of whole records (the zip
of ``torch.save``), each rank keeps the CRC of the bytes that it read. The ranks then check the records together, see
:func:`check_records_of`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import xxhash

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.reads.leftovers import Leftovers
from ort_zero.checkpoint.reads.reading import ReadRequest, overlaps
from ort_zero.checkpoint.reads.record_checks import Part, check_record
from ort_zero.checkpoint.records import File, Piece, Tensor
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CorruptCheckpointError
from ort_zero.utils.crc32 import crc32

_MAX_GAP = 64 << 10
"""Maximum number of unneeded bytes that are read to save a call."""
_SMALL_GAP = 4096
_NEEDED_PER_GAP = 32
"""Minimum ratio of a batch's bytes to the next gap, if the gap is larger than `_SMALL_GAP`."""


class WantedBytes(NamedTuple):
    """A range of elements of one piece, and the memory into which it is read."""

    tensor: Tensor
    piece: Piece
    low: int
    """First byte in the file that has to be read."""
    high: int
    """End of the bytes that have to be read, exclusive."""
    begin: int
    """First byte in the file that is copied to `target`."""
    target: torch.Tensor
    """1-D and contiguous, in CPU memory, of any dtype."""

    @property
    def wanted(self) -> int:
        """Number of bytes in the file that are copied to `target`."""
        return self.target.numel() * dtypes.itemsize(self.tensor.dtype)


class CheckedReader:
    """A reader that fills targets from the files of one checkpoint.

    Args:
        folder: folder of the checkpoint.
        files: its files by name.
        leftovers: keeps the ends of pieces that are read for their checksum alone, for later reads.

    Attributes:
        parts: the parts that were read of records with a CRC.
    """

    parts: list[Part]

    def __init__(self, folder: Folder, files: Mapping[str, File], leftovers: Leftovers | None = None):
        self._folder = folder
        self._leftovers = leftovers
        self._records = {file.name: sorted(file.records) for file in files.values() if file.records}
        self._block = folder.block
        self._buffer = memoryview(bytearray(self._block))
        self.parts = []

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Read `requests` into their targets, 1-D and contiguous in CPU memory, cast to the targets' dtypes.

        Raises:
            CorruptCheckpointError: bytes are missing or do not match their checksum.
            CheckpointError: a file cannot be read.
        """
        by_file: dict[str, list[WantedBytes]] = {}
        for request in requests:
            if request.tensor.strides is not None:
                self._read_strided(request)
                continue
            for item in wanted_of(request):
                if not self._taken(item):
                    by_file.setdefault(item.piece.file, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: item.low)
            self._read_file(name, items)

    def _taken(self, item: WantedBytes) -> bool:
        """Fill the target of `item` with bytes that an earlier read kept; return False if there are none."""
        if self._leftovers is None or item.piece.check is None:
            return False
        kept = self._leftovers.take(item.piece, item.begin, item.wanted)
        if kept is None:
            return False
        for position in range(0, len(kept), self._block):
            _put(item, kept[position : position + self._block], position)
        return True

    def _room(self, item: WantedBytes) -> memoryview | None:
        """Return memory for the bytes of a piece behind the wanted bytes, None if no later read wants them."""
        if self._leftovers is None or item.piece.check is None:
            return None
        return self._leftovers.room(item.piece, item.begin + item.wanted)

    def _read_file(self, name: str, items: list[WantedBytes]) -> None:
        batch: list[WantedBytes] = []
        end = 0
        for item in items:
            large = item.high - item.low > self._block
            gap = min(_MAX_GAP, max(_SMALL_GAP, (end - batch[0].low) // _NEEDED_PER_GAP)) if batch else 0
            if batch and (large or item.low > end + gap or max(end, item.high) - batch[0].low > self._block):
                self._read_batch(name, batch, end)
                batch = []
            if large:
                self._read_large(name, item)
                continue
            end = max(end, item.high) if batch else item.high
            batch.append(item)
        if batch:
            self._read_batch(name, batch, end)

    def _read_batch(self, name: str, batch: list[WantedBytes], end: int) -> None:
        """Read neighbouring ranges with one call."""
        start = batch[0].low
        view = self._bring(name, start, end, self._buffer[: end - start])
        for item in batch:
            if item.piece.check is not None:
                piece_bytes = view[item.low - start : item.high - start]
                self._compare(item, xxhash.xxh3_64_hexdigest(piece_bytes))
            wanted_end = item.begin - start + item.wanted
            _put(item, view[item.begin - start : wanted_end], 0)
            if (room := self._room(item)) is not None:
                room[:] = view[wanted_end : item.high - start]

    def _read_large(self, name: str, item: WantedBytes) -> None:
        """Read one piece block by block, directly into its target where no cast is needed."""
        digest = xxhash.xxh3_64()
        size, room = item.wanted, self._room(item)
        straight = _bytes_of(item)
        position = item.low
        while position < item.high:
            low, high = position - item.begin, min(position + self._block, item.high) - item.begin
            if straight is not None and 0 <= low < size:
                high = min(high, size)
                view = self._bring(name, position, item.begin + high, straight[low:high])
            elif room is not None and low >= size:
                view = self._bring(name, position, item.begin + high, room[low - size : high - size])
            else:
                if low < 0:
                    high = min(high, 0) if straight is not None else high
                if room is not None and low < size:
                    high = min(high, size)
                view = self._bring(name, position, item.begin + high, self._buffer[: high - low])
                begin, end = max(low, 0), min(high, size)
                if begin < end:
                    _put(item, view[begin - low : end - low], begin)
            if item.piece.check is not None:
                digest.update(view)
            position = item.begin + high
        if item.piece.check is not None:
            self._compare(item, digest.hexdigest())

    def _read_strided(self, request: ReadRequest) -> None:
        """Read a tensor that is not row-major and lies in one piece."""
        assert request.target is not None and request.tensor.strides is not None
        (piece,) = request.tensor.pieces
        data = bytearray(piece.length)
        view = self._bring(piece.file, piece.offset, piece.offset + piece.length, memoryview(data))
        if piece.check is not None and xxhash.xxh3_64_hexdigest(view) != piece.check:
            raise self._damaged(request.tensor, piece)
        flat = torch.frombuffer(data, dtype=dtypes.torch_dtype(request.tensor.dtype))
        whole = flat.as_strided(request.tensor.shape, request.tensor.strides).reshape(-1)
        request.target.copy_(whole.narrow(0, request.start, request.length))

    def _bring(self, name: str, start: int, end: int, view: memoryview) -> memoryview:
        self._folder.read_into(name, start, view)
        if name in self._records:
            self._note(name, start, view)
        return view

    def _note(self, name: str, offset: int, view: memoryview) -> None:
        """Keep the CRC of a range that was read: one part per record, joined with the part directly before."""
        records = self._records[name]
        end = offset + len(view)
        for start, length, _ in records[max(0, bisect.bisect_right(records, (offset, math.inf)) - 1) :]:
            low, high = max(offset, start), min(end, start + length)
            if start >= end:
                break
            if low >= high:
                continue
            last = self.parts[-1] if self.parts else None
            if last and last[:2] == (name, start) and last.offset + last.length == low:
                crc = crc32(view[low - offset : high - offset], last.crc)
                self.parts[-1] = Part(name, start, last.offset, high - last.offset, crc)
            else:
                self.parts.append(Part(name, start, low, high - low, crc32(view[low - offset : high - offset])))

    def _compare(self, item: WantedBytes, digest: str) -> None:
        if digest != item.piece.check:
            raise self._damaged(item.tensor, item.piece)

    def _damaged(self, tensor: Tensor, piece: Piece) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._folder.path(piece.file)} is damaged: the bytes of {tensor.kind} of {tensor.name} do not match "
            "their checksum (ort-zero verify lists everything that is wrong)"
        )


def wanted_of(request: ReadRequest) -> Iterable[WantedBytes]:
    """Yield the bytes to read of each piece in the range; a piece with a checksum is read whole."""
    assert request.target is not None, "the request needs a target"
    size = dtypes.itemsize(request.tensor.dtype)
    for piece, first, length in overlaps(request):
        begin = piece.offset + first * size
        low, high = (piece.offset, piece.offset + piece.length) if piece.check else (begin, begin + length * size)
        target = request.target.narrow(0, piece.start + first - request.start, length)
        yield WantedBytes(request.tensor, piece, low, high, begin, target)


def _bytes_of(item: WantedBytes) -> memoryview | None:
    """Return the target of `item` as bytes, None if the stored values have another dtype."""
    if item.target.dtype != dtypes.torch_dtype(item.tensor.dtype):
        return None
    return item.target.view(torch.uint8).numpy().data


def _put(item: WantedBytes, view: memoryview, position: int) -> None:
    """Copy stored bytes to the target, `position` bytes (in the stored dtype) from its first element."""
    straight = _bytes_of(item)
    if straight is not None:
        straight[position : position + len(view)] = view
        return
    size = dtypes.itemsize(item.tensor.dtype)
    # a copy, since a block need not begin at a multiple of the element's size
    stored = torch.frombuffer(bytearray(view), dtype=dtypes.torch_dtype(item.tensor.dtype))
    item.target.narrow(0, position // size, len(view) // size).copy_(stored)


def check_records_of(folder: Folder, files: Mapping[str, File], parts: list[Part], ranks: RankGroup) -> None:
    """Check each record of which any rank has read a part, shared among the ranks. All ranks must call.

    Args:
        folder: folder of the checkpoint.
        files: its files by name.
        parts: parts that this rank has read.
        ranks: all ranks that read.

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
                record: Any = next(r for r in files[name].records if r[0] == start)
                check_record(folder, files[name], record, read[name, start])
