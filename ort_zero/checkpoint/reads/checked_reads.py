"""Read ranges of stored tensors into memory, each byte once, and compare the bytes with their checksums.

Neighbouring ranges of a file are read together. A piece with its own checksum is read whole the first time, since the
checksum covers the whole piece. Where a format has checksums of whole records (the zip of ``torch.save``), each rank
keeps the CRC of the bytes that it read. The ranks then check the records together, see :func:`check_records_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from isal.isal_zlib import crc32, crc32_combine

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.pieces import overlaps
from ort_zero.checkpoint.records import Checksum, File, Piece, Tensor
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CorruptCheckpointError

if TYPE_CHECKING:
    import torch

_MAX_GAP = 64 << 10
"""Maximum number of unneeded bytes that are read to save a call."""
_SMALL_GAP = 4096
_NEEDED_PER_GAP = 32
"""Minimum ratio of a batch's bytes to the next gap, if the gap is larger than `_SMALL_GAP`."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A range of a stored tensor, and the memory into which it is read."""

    tensor: Tensor
    target: torch.Tensor
    """1-D and contiguous, in CPU memory, of any floating-point dtype; has as many elements as are read."""
    start: int = 0
    """First element in the flattened tensor."""


class WantedBytes(NamedTuple):
    """A range of elements of one piece, and the memory into which it is read."""

    tensor: Tensor
    piece: Piece
    first: int
    """First byte that is wanted, from the start of the piece."""
    wanted: int  # bytes
    target: torch.Tensor | memoryview
    """1-D and contiguous, in CPU memory: a tensor of any dtype, or bytes of the stored dtype."""


class Part(NamedTuple):
    """A range of bytes of a record that was read, with its CRC-32."""

    file: str
    record: int
    """Offset of the record in the file."""
    offset: int  # bytes from the start of the file
    length: int  # bytes
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
        return [*self._closed, *self._open.values()]


class CheckedReader:
    """A reader that fills memory from the files of one checkpoint. For one thread."""

    def __init__(self, folder: Folder, files: Mapping[str, File], verify: bool = True):
        self._folder = folder
        self._verify = verify
        self._records = RecordChecks(files.values() if verify else ())
        self._checked: set[Piece] = set()
        """The pieces that were compared: later reads take only the wanted bytes of them."""
        self._buffer = memoryview(bytearray(folder.block))

    @property
    def parts(self) -> list[Part]:
        return self._records.parts()

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Read `requests` into their targets, cast to the targets' dtypes."""
        wanted: list[WantedBytes] = []
        for request in requests:
            if request.tensor.strides is not None:
                self._read_strided(request)
            else:
                wanted += wanted_of(request)
        self.read_pieces(wanted)

    def read_pieces(self, wanted: Iterable[WantedBytes]) -> None:
        """Read parts of pieces into their targets; raises as :meth:`read` does."""
        by_file: dict[str, list[WantedBytes]] = {}
        for item in wanted:
            by_file.setdefault(item.piece.file, []).append(item)
        if self._folder.parallel_reads > 1 and len(by_file) > 1:
            with ThreadPoolExecutor(self._folder.parallel_reads) as pool:
                list(pool.map(lambda name: self._read_file(by_file[name], is_parallel=True), by_file))
            return
        for items in by_file.values():
            self._read_file(items)

    def blocks(self, tensor: Tensor, piece: Piece) -> Iterator[memoryview]:
        """Yield the bytes of a whole piece block by block, in memory that the next block overwrites."""
        digest = xxhash.xxh3_64()
        for position in range(0, piece.length, len(self._buffer)):
            view = self._buffer[: min(len(self._buffer), piece.length - position)]
            self._bring(piece.file, piece.offset + position, view)
            if self._checks(piece):
                digest.update(view)
            yield view
        if self._checks(piece):
            self._compare(tensor, piece, digest.digest())

    def _checks(self, piece: Piece) -> bool:
        return self._verify and piece.check is not None and piece not in self._checked

    def _extent(self, item: WantedBytes) -> tuple[int, int]:
        """Return the first byte in the file that has to be read, and the byte behind the last."""
        piece = item.piece
        if self._checks(piece):
            return piece.offset, piece.offset + piece.length
        return piece.offset + item.first, piece.offset + item.first + item.wanted

    def _read_file(self, items: list[WantedBytes], is_parallel: bool = False) -> None:
        """Read the items of one file, neighbours with one call; `is_parallel` says that other calls use the buffer."""
        extents = sorted(((*self._extent(item), item) for item in items), key=lambda extent: extent[:2])
        size, buffer = len(self._buffer), self._buffer
        if is_parallel:
            buffer = memoryview(bytearray(min(size, extents[-1][1] - extents[0][0])))
        batch: list[WantedBytes] = []
        start = end = 0
        for low, high, item in extents:
            gap = min(_MAX_GAP, max(_SMALL_GAP, (end - start) // _NEEDED_PER_GAP))
            if batch and (low > end + gap or max(end, high) - start > size):
                self._read_batch(batch, start, buffer[: end - start])
                batch = []
            if high - low > size:
                self._read_large(item, low, high, buffer)
                continue
            start, end = (start, max(end, high)) if batch else (low, high)
            batch.append(item)
        if batch:
            self._read_batch(batch, start, buffer[: end - start])

    def _read_batch(self, batch: list[WantedBytes], start: int, view: memoryview) -> None:
        self._bring(batch[0].piece.file, start, view)
        for item in batch:
            piece = item.piece
            at = piece.offset - start
            if self._checks(piece):
                self._compare(item.tensor, piece, xxhash.xxh3_64_digest(view[at : at + piece.length]))
            _put(item, view[at + item.first : at + item.first + item.wanted], 0)

    def _read_large(self, item: WantedBytes, low: int, high: int, buffer: memoryview) -> None:
        """Read one piece block by block, directly into its target where that takes the bytes as they are stored."""
        checks, digest = self._checks(item.piece), xxhash.xxh3_64()
        begin = item.piece.offset + item.first
        end = begin + item.wanted
        target = _bytes_of(item)
        for position in range(low, high, len(buffer)):
            stop = min(position + len(buffer), high)
            first, last = max(position, begin), min(stop, end)
            straight = target if (first, last) == (position, stop) else None
            view = buffer[: stop - position] if straight is None else straight[position - begin : stop - begin]
            self._bring(item.piece.file, position, view)
            if checks:
                digest.update(view)
            if straight is None and first < last:
                _put(item, view[first - position : last - position], first - begin)
        if checks:
            self._compare(item.tensor, item.piece, digest.digest())

    def _read_strided(self, request: ReadRequest) -> None:
        import torch

        tensor = request.tensor
        assert tensor.strides is not None
        (piece,) = tensor.pieces
        data = bytearray(piece.length)
        self.read_pieces([WantedBytes(tensor, piece, 0, piece.length, memoryview(data))])
        whole = torch.frombuffer(data, dtype=dtypes.torch_dtype(tensor.dtype)).as_strided(tensor.shape, tensor.strides)
        request.target.copy_(whole.reshape(-1).narrow(0, request.start, request.target.numel()))

    def _bring(self, name: str, start: int, view: memoryview) -> None:
        self._folder.read_into(name, start, view)
        self._records.add(name, start, view)

    def _compare(self, tensor: Tensor, piece: Piece, digest: bytes) -> None:
        if digest != piece.check:
            raise CorruptCheckpointError(
                f"{self._folder.path(piece.file)} is damaged: the bytes of {tensor.kind} of {tensor.name} do not match "
                "their checksum (ort-zero verify lists everything that is wrong)"
            )
        self._checked.add(piece)


def read_whole(folder: Folder, tensor: Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of a stored tensor in its shape, checked, in its own or another dtype."""
    import torch

    target = torch.empty(tensor.elements, dtype=dtype or dtypes.torch_dtype(tensor.dtype))
    CheckedReader(folder, {}).read([ReadRequest(tensor, target)])
    return target.view(tensor.shape)


def wanted_of(request: ReadRequest) -> Iterator[WantedBytes]:
    """Yield the bytes to read of each piece in the range of a request."""
    size = dtypes.itemsize(request.tensor.dtype)
    for piece, first, length in overlaps(request.tensor, request.start, request.target.numel()):
        target = request.target.narrow(0, piece.start + first - request.start, length)
        yield WantedBytes(request.tensor, piece, first * size, length * size, target)


def _bytes_of(item: WantedBytes) -> memoryview | None:
    """Return the target of `item` as bytes, None if the stored values have another dtype."""
    if isinstance(item.target, memoryview):
        return item.target
    import torch

    if item.target.dtype != dtypes.torch_dtype(item.tensor.dtype):
        return None
    return item.target.view(torch.uint8).numpy().data


def _put(item: WantedBytes, view: memoryview, position: int) -> None:
    """Copy stored bytes to the target, `position` bytes (in the stored dtype) from its first element."""
    straight = _bytes_of(item)
    if straight is not None:
        straight[position : position + len(view)] = view
        return
    import torch

    assert isinstance(item.target, torch.Tensor)
    size = dtypes.itemsize(item.tensor.dtype)
    # a copy, since a block need not begin at a multiple of the element's size
    stored = torch.frombuffer(bytearray(view), dtype=dtypes.torch_dtype(item.tensor.dtype))
    item.target.narrow(0, position // size, len(view) // size).copy_(stored)


def check_records_of(folder: Folder, files: Mapping[str, File], parts: list[Part], ranks: RankGroup) -> None:
    """Check each record of which any rank has read a part, shared among the ranks. All ranks must call."""
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
