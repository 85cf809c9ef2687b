"""Writes the files of a plan: reads slices by offset, checks, casts, writes in sequence; holds a few chunks at a time.

Per file two threads work: one reads the next block and computes its checksum while the other casts and writes the one
before. Every byte is read once: pieces with a hash of their own are checked as they pass; where a format checks whole
records (the zip of ``torch.save``) the CRC of each part is kept, and :func:`check_records` combines them at the end.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import torch
import xxhash
from isal import isal_zlib

from ort_zero.checkpoint.aggregation_plan import OutputEntry, OutputFile
from ort_zero.checkpoint.dtypes import itemsize, torch_dtype
from ort_zero.checkpoint.records import BUFFER, File, Piece
from ort_zero.checkpoint.storage import CHUNK, Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_ALIGNMENT = 8
"""Alignment in bytes of slices in the buffer: the widest element type needs multiples of it."""


class Part(NamedTuple):
    """Bytes of a record that were read, with their CRC-32."""

    file: str
    record: int
    """Offset of the record in the file."""
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Number of bytes that were read."""
    crc: int


@dataclass
class Findings:
    """The findings of the stream. Thread-safe as far as it is used: ``list.append``, ``set.add``."""

    parts: list[Part] = field(default_factory=list)
    not_finite: set[str] = field(default_factory=set)
    """Names of parameters whose stored values hold NaN or inf."""
    overflown: set[str] = field(default_factory=set)
    """Names of parameters whose finite values became inf by the cast."""


class _Slice(NamedTuple):
    """A range of bytes of one piece, at most a chunk long unless the tensor is strided."""

    entry: OutputEntry
    piece: Piece
    offset: int
    """Bytes from the start of the source file."""
    length: int
    """Length of the range in bytes."""
    buffer_offset: int
    """Bytes from the start of the buffer of its batch."""


class _Stopped(Exception):
    """Another thread failed, or the user interrupted; said elsewhere."""


class Streamer:
    """Writes output files from one source.

    Args:
        source: folder with the shards.
        files: its files by name.
        place_of: returns folder and name to write an output file to.
        token: names this run's partial files.
        verify: compare what is read with the checksums of the format.
        advance: called with the bytes of each block that was written.
    """

    def __init__(
        self,
        source: Folder,
        files: Mapping[str, File],
        place_of: Callable[[OutputFile], tuple[Folder, str]],
        token: str,
        *,
        verify: bool = True,
        advance: Callable[[int], object] = lambda number: None,
    ):
        self.findings = Findings()
        self._source = source
        self._place_of = place_of
        self._token = token
        self._verify = verify
        self._advance = advance
        self._stop = threading.Event()
        self._records = {f.name: sorted(f.records) for f in files.values() if f.records}

    def write(self, files: Iterable[OutputFile], workers: int, then: Callable[[OutputFile], None]) -> None:
        """Write the data of `files` under partial names, `workers` at a time, and call `then` for each that is there.

        Raises:
            CorruptCheckpointError: bytes are missing or do not match their checksum.
            CheckpointError: a file cannot be read or written.
        """
        with ThreadPoolExecutor(workers, thread_name_prefix="aggregate") as pool:
            try:
                jobs = [pool.submit(self._one, file, then) for file in files]
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                failed = [error for job in done if (error := job.exception()) is not None]
                if failed:
                    raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _one(self, file: OutputFile, then: Callable[[OutputFile], None]) -> None:
        sink, name = self._place_of(file)
        with sink.writing(name, self._token) as out:
            out.write(file.header)
            writer = _Writer(out, self.findings)
            with closing(self._blocks(file)) as blocks:
                for batch, buffer in blocks:
                    for item in batch:
                        writer.put(item, buffer[item.buffer_offset : item.buffer_offset + item.length])
                    self._advance(sum(item.length for item in batch))
        then(file)

    def _blocks(self, file: OutputFile) -> Generator[tuple[list[_Slice], memoryview], None, None]:
        """Yield batches with their bytes; while one is used the next is read."""
        ring = [memoryview(bytearray(CHUNK)) for _ in range(2)]
        checks = _PieceChecks(self._source)
        with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
            pending = None
            for number, batch in enumerate(batches(file.entries)):
                size = batch[-1].buffer_offset + batch[-1].length
                if size > CHUNK and pending:
                    # a strided tensor is read whole; not beside another one
                    yield pending[0], pending[1].result()
                    pending = None
                buffer = ring[number % 2] if size <= CHUNK else memoryview(bytearray(size))
                job = reader.submit(self._fill, batch, buffer, checks)
                if pending:
                    yield pending[0], pending[1].result()
                pending = (batch, job)
                if size > CHUNK:
                    yield batch, job.result()
                    pending = None
                del job, buffer
            if pending:
                yield pending[0], pending[1].result()

    def _fill(self, batch: list[_Slice], buffer: memoryview, checks: _PieceChecks) -> memoryview:
        if self._stop.is_set():
            raise _Stopped
        for run in _adjacent(batch):
            first, last = run[0], run[-1]
            view = buffer[first.buffer_offset : last.buffer_offset + last.length]
            name = first.piece.file
            try:
                self._source.read_into(name, first.offset, view)
            except OSError as error:
                raise CheckpointError(f"cannot read {self._source.path(name)}: {error.strerror or error}") from error
            if self._verify:
                for item in run:
                    checks.add(item, buffer[item.buffer_offset : item.buffer_offset + item.length])
                if name in self._records:
                    self._note(name, first.offset, view)
        return buffer

    def _note(self, name: str, offset: int, view: memoryview) -> None:
        """Keep the CRC of a range that was read, cut at the borders of records."""
        records = self._records[name]
        end = offset + len(view)
        index = max(0, bisect.bisect_right(records, (offset, math.inf)) - 1)
        for start, length, _ in records[index:]:
            low, high = max(offset, start), min(end, start + length)
            if start >= end:
                break
            if low < high:
                crc = isal_zlib.crc32(view[low - offset : high - offset])
                self.findings.parts.append(Part(name, start, low, high - low, crc))


class _PieceChecks:
    """Compares pieces with their hash while their slices pass in order."""

    def __init__(self, source: Folder):
        self._source = source
        self._hash = xxhash.xxh3_64()

    def add(self, item: _Slice, view: memoryview) -> None:
        """Take the next slice; at the end of its piece compare.

        Raises:
            CorruptCheckpointError: the piece is not what was saved.
        """
        piece = item.piece
        if piece.check is None:
            return
        if item.offset == piece.offset:
            self._hash.reset()
        self._hash.update(view)
        if item.offset + item.length == piece.offset + piece.length and self._hash.hexdigest() != piece.check:
            tensor = item.entry.tensor
            raise CorruptCheckpointError(
                f"{self._source.path(piece.file)} is damaged: {tensor.kind} of {tensor.name}, bytes {piece.offset} to "
                f"{piece.offset + piece.length}: their xxh3-64 is {self._hash.hexdigest()}, not {piece.check}"
            )


class _Writer:
    """Turns source bytes into what the output holds, and writes them."""

    def __init__(self, out: IO[bytes], findings: Findings):
        self._out = out
        self._findings = findings
        self._buffer = bytearray()

    def put(self, item: _Slice, view: memoryview) -> None:
        """Write one slice, cast if the output has another dtype; note values that are not finite."""
        entry = item.entry
        tensor = entry.tensor
        scan = entry.tensor.kind != BUFFER and not tensor.is_optimizer_state
        plain = entry.dtype == tensor.dtype and tensor.strides is None
        if plain and not scan:
            self._out.write(view)
            return
        values = torch.frombuffer(view, dtype=torch_dtype(tensor.dtype))
        if tensor.strides is None:
            self._put(entry, values, view if plain else None, scan)
            return
        values = values.as_strided(tensor.shape, tensor.strides)
        row_bytes = max(1, tensor.nbytes // max(1, tensor.shape[0]))
        for rows in values.split(max(1, CHUNK // row_bytes)):
            self._put(entry, rows, None, scan)

    def _put(self, entry: OutputEntry, values: torch.Tensor, ready: memoryview | None, scan: bool) -> None:
        finite = not scan or not values.is_floating_point() or all_finite(values)
        if not finite:
            self._findings.not_finite.add(entry.tensor.name)
        if ready is not None:
            self._out.write(ready)
            return
        count = values.numel()
        size = count * itemsize(entry.dtype)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        result = torch.frombuffer(view, dtype=torch_dtype(entry.dtype))
        result.view(values.shape).copy_(values)
        if scan and finite and result.is_floating_point() and not all_finite(result):
            self._findings.overflown.add(entry.tensor.name)
        self._out.write(view)


def all_finite(values: torch.Tensor) -> bool:
    """Return True if `values` holds neither NaN nor inf; a sum tells, unless it overflows itself."""
    if values.element_size() == 1:  # torch cannot add up eight-bit floats
        values = values.float()
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def batches(entries: Iterable[OutputEntry]) -> Iterator[list[_Slice]]:
    """Yield the slices of all entries in order, a chunk or less at a time, each with its offset in the buffer."""
    batch: list[_Slice] = []
    filled = 0
    for entry, piece, offset, length in _slices(entries):
        start = -(-filled // _ALIGNMENT) * _ALIGNMENT if filled % itemsize(entry.tensor.dtype) else filled
        if batch and start + length > CHUNK:
            yield batch
            batch, start = [], 0
        batch.append(_Slice(entry, piece, offset, length, start))
        filled = start + length
    if batch:
        yield batch


def _slices(entries: Iterable[OutputEntry]) -> Iterator[tuple[OutputEntry, Piece, int, int]]:
    for entry in entries:
        for piece in entry.tensor.pieces:
            step = CHUNK if entry.tensor.strides is None else max(1, piece.length)
            for start in range(0, piece.length, step):
                yield entry, piece, piece.offset + start, min(step, piece.length - start)


def _adjacent(batch: list[_Slice]) -> Iterator[list[_Slice]]:
    """Yield runs of slices that lie side by side in one file and in the buffer: one read each."""
    run: list[_Slice] = []
    for item in batch:
        if run:
            last = run[-1]
            beside = item.offset == last.offset + last.length and item.buffer_offset == last.buffer_offset + last.length
            if not beside or item.piece.file != last.piece.file:
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def check_records(source: Folder, file: File, record: tuple[int, int, int], parts: Iterable[Part]) -> None:
    """Compare one record with its CRC-32, reading only the bytes that no part covers.

    Raises:
        CorruptCheckpointError: the record is not what was saved.
    """
    start, length, wanted = record
    position, crc = start, 0
    for part in sorted(set(parts), key=lambda p: (p.offset, -p.length)):
        if part.offset < position:
            continue  # an overlap; what it holds beyond the last part is read as a gap
        crc = _crc_of_gap(source, file.name, position, part.offset, crc)
        crc = isal_zlib.crc32_combine(crc, part.crc, part.length)
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
        crc = isal_zlib.crc32(block, crc)
        start += len(block)
    return crc
