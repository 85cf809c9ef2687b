"""Write ranges of output files: read, check, cast and write one window of the source at a time in each thread.

Every byte is read once, in few large reads that scatter a source file's bytes to their places in the window. Pieces
with a checksum are checked as they are read. Formats such as the zip of ``torch.save`` have one CRC-32 per record:
:func:`~ort_zero.checkpoint.reads.record_checks.check_record` combines the CRCs of the parts that were read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO, Any

import xxhash

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputEntry, OutputFile
from ort_zero.checkpoint.aggregation.aggregation_ranges import FileRange, is_checked_in
from ort_zero.checkpoint.aggregation.aggregation_windows import PieceRead, Stretch, Window, windows
from ort_zero.checkpoint.files.casting import all_finite, as_integers, cast, rows_of
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import CHUNK, Folder, LocalFolder
from ort_zero.checkpoint.reads.record_checks import Part, RecordChecks
from ort_zero.checkpoint.records import File, Piece
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_MIN_WINDOW = 1 << 20  # bytes
_BYTES_PER_FILE = 32 << 10
"""Bytes of a window per source file: a window of ZeRO-3 has a part of each file, and every read has a fixed cost."""
_MAX_GAP = 4096
"""Maximum number of bytes between two pieces of a record that one read includes: the record's CRC needs them."""
_MAX_BUFFERS = 1000
"""Maximum number of buffers of one read; the kernel takes 1024."""
_SCRATCH = 256 << 10  # bytes


@dataclass
class Findings:
    """The reports of the threads about checksums and values; thread-safe through ``list.extend`` and ``set.update``."""

    parts: list[Part] = field(default_factory=list)
    not_finite: set[str] = field(default_factory=set)
    """Names of parameters whose stored values hold NaN or inf."""
    overflown: set[str] = field(default_factory=set)
    """Names of parameters with finite values that the cast turned into inf."""


class _Stopped(Exception):
    """Another thread failed or the user interrupted; that other error is raised, not this one."""


class Streamer:
    """A writer of output files from one checkpoint.

    Args:
        source: folder with the shards.
        files: the files of the checkpoint by name.
        place_of: returns the folder and the name under which an output file is written.
        token: part of the names of this run's partial files.
        verify: compare the bytes that are read with the checksums of the format.
        advance: called with the number of source bytes of each written window.
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
        self._files = list(files.values()) if verify else []
        self._verify = verify
        self._advance = advance
        self._stop = threading.Event()
        self._window = max(CHUNK, source.block)
        if isinstance(source, LocalFolder):
            self._window = min(CHUNK, max(_MIN_WINDOW, _BYTES_PER_FILE * len(files)))

    def write(
        self,
        ranges: Sequence[Sequence[FileRange]],
        files: Iterable[OutputFile],
        workers: int,
        then: Callable[[OutputFile], None],
    ) -> None:
        """Write `ranges` and whole `files` under partial names, with `workers` threads.

        Args:
            ranges: lists of ranges, one list per thread, of files that several threads and ranks write.
            files: files that one thread each writes from begin to end.
            workers: number of threads.
            then: called with each of `files` when it is written.

        Raises:
            CorruptCheckpointError: bytes are missing or do not match their checksum.
            CheckpointError: a file cannot be read or written.
        """
        with ThreadPoolExecutor(workers, thread_name_prefix="aggregate") as pool:
            try:
                jobs = [pool.submit(self._ranges, parts) for parts in ranges if parts]
                jobs += [pool.submit(self._whole, file, then) for file in files]
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                failed = [error for job in done if (error := job.exception()) is not None]
                if failed:
                    raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ranges(self, ranges: Sequence[FileRange]) -> None:
        reader = _Reader(self._source, self._files, self._verify, self._window)
        for part in ranges:
            sink, name = self._place_of(part.file)
            with sink.writing_from(name, self._token, part.begin) as out:
                self._copy(part, reader, out)
        self.findings.parts.extend(reader.parts())

    def _whole(self, file: OutputFile, then: Callable[[OutputFile], None]) -> None:
        reader = _Reader(self._source, self._files, self._verify, self._window)
        sink, name = self._place_of(file)
        with sink.writing(name, self._token) as out:
            self._copy(FileRange(file, 0, file.size), reader, out)
        self.findings.parts.extend(reader.parts())
        then(file)

    def _copy(self, part: FileRange, reader: _Reader, out: IO[bytes]) -> None:
        """Write one range into `out`, a stream that begins at the first byte of the range."""
        if part.begin == 0:
            out.write(part.file.header)
        writer = _Writer(out, self.findings)
        reader.begin(part)
        for window in windows(part, self._window):
            if self._stop.is_set():
                raise _Stopped
            buffer = reader.read(window)
            for stretch in window.stretches:
                writer.put(stretch, buffer)
            self._advance(sum(read.length for read in window.reads))
        reader.finish_piece()


class _Reader:
    """A reader of windows that checks their bytes, for one thread.

    Args:
        source: folder with the shards.
        files: files to check by record.
        verify: compare pieces with their checksum.
        size: bytes of the window buffer; a larger window gets a temporary buffer.
    """

    def __init__(self, source: Folder, files: Iterable[File], verify: bool, size: int):
        self._source = source
        self._records = RecordChecks(files)
        self._pieces = _PieceChecks(source) if verify else None
        self._buffer = memoryview(bytearray(size))
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._later: list[tuple[str, int, list[memoryview]]] | None = None if isinstance(source, LocalFolder) else []
        """Reads of an object store to be made in one call per window; None for local files, which are read at once."""

    def begin(self, part: FileRange) -> None:
        """Begin with the windows of another range."""
        if self._pieces is not None:
            self._pieces.begin(part)

    def read(self, window: Window) -> memoryview:
        """Return the bytes of a window, in a buffer that the next call overwrites.

        Raises:
            CorruptCheckpointError: a file ends early, or a piece does not match its checksum.
            CheckpointError: a file cannot be read.
        """
        buffer = self._buffer
        if window.filled > len(buffer):
            buffer = memoryview(bytearray(window.filled))
        for name, reads in groupby(sorted(window.reads, key=_place), key=lambda read: read.piece.file):
            self._read_file(name, reads, buffer)
        if self._later:
            self._source.read_many(self._later)
            for name, offset, views in self._later:
                self._records.add(name, offset, views)
            self._later.clear()
        if self._pieces is not None:
            for read in window.reads:
                if read.piece.check is not None:
                    self._pieces.add(read, buffer[read.at : read.at + read.length])
        return buffer

    def finish_piece(self) -> None:
        """Check the piece at the end of a range, if another thread writes the rest of the piece."""
        if self._pieces is not None:
            self._pieces.finish()

    def parts(self) -> list[Part]:
        """Return the parts of records that were read, with their CRC-32."""
        return self._records.parts()

    def _read_file(self, name: str, reads: Iterable[PieceRead], buffer: memoryview) -> None:
        """Read a window's pieces of one file, in the order of the file, with one call for neighbouring pieces."""
        views: list[memoryview] = []
        start = end = used = 0
        begin_at = end_at = 0  # range in the buffer of neighbours that are not in `views` yet
        border: int | None = None
        for read in reads:
            gap = read.offset - end
            fits = border is None or read.offset < border
            if views or end_at > begin_at:
                if gap == 0 and fits and read.at == end_at:
                    end += read.length
                    end_at += read.length
                    continue
                views.append(buffer[begin_at:end_at])
                max_gap = 0 if border is None else min(_MAX_GAP, _SCRATCH - used)
                if fits and 0 <= gap <= max_gap and len(views) < _MAX_BUFFERS - 2:
                    if gap:
                        views.append(self._gap(used, gap))
                        used += gap
                    begin_at, end_at, end = read.at, read.at + read.length, read.offset + read.length
                    continue
                self._read_views(name, start, views)
            border, before = self._records.place_of(name, read.offset)
            views, used, start = [], 0, read.offset
            if before is not None and 0 < read.offset - before <= _MAX_GAP:
                used, start = read.offset - before, before
                views.append(self._gap(0, used))
            begin_at, end_at, end = read.at, read.at + read.length, read.offset + read.length
        views.append(buffer[begin_at:end_at])
        self._read_views(name, start, views)

    def _gap(self, used: int, size: int) -> memoryview:
        """Return a buffer for unused bytes between pieces; reads of a store happen later and need separate buffers."""
        return self._scratch[used : used + size] if self._later is None else memoryview(bytearray(size))

    def _read_views(self, name: str, offset: int, views: list[memoryview]) -> None:
        if self._later is not None:
            self._later.append((name, offset, views))
            return
        try:
            self._source.read_scattered(name, offset, views)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._source.path(name)}: {error.strerror or error}") from error
        self._records.add(name, offset, views)


def _place(read: PieceRead) -> tuple[str, int]:
    return read.piece.file, read.offset


class _PieceChecks:
    """The comparison of pieces with their checksum, while their bytes are read in the order of the output.

    A cut piece is checked by the writer of its largest part, which reads the other parts of the piece once more.
    """

    def __init__(self, source: Folder):
        self._source = source
        self._hash = xxhash.xxh3_64()
        self._part: FileRange | None = None
        self._open: PieceRead | None = None
        """The previous read, if its piece is checked here and is not complete yet."""

    def begin(self, part: FileRange) -> None:
        """Begin with the pieces of another range."""
        self._part, self._open = part, None

    def add(self, read: PieceRead, view: memoryview) -> None:
        """Add the next bytes of a piece; compare the checksum at the end of the piece.

        Raises:
            CorruptCheckpointError: the piece does not match its checksum.
        """
        piece, end = read.piece, read.offset + read.length
        if read.length == piece.length:
            self._compare(read.entry, piece, xxhash.xxh3_64_hexdigest(view))
            return
        if self._open is None:
            assert self._part is not None, "a range has begun"
            if not is_checked_in(self._part, read.entry, piece):
                return
            self._hash.reset()
            self._read_only(piece, piece.offset, read.offset)
        self._hash.update(view)
        self._open = read
        if end == piece.offset + piece.length:
            self._open = None
            self._compare(read.entry, piece, self._hash.hexdigest())

    def finish(self) -> None:
        """Read the rest of the piece that the end of the range cuts, only to check it."""
        read, self._open = self._open, None
        if read is not None:
            self._read_only(read.piece, read.offset + read.length, read.piece.offset + read.piece.length)
            self._compare(read.entry, read.piece, self._hash.hexdigest())

    def _read_only(self, piece: Piece, begin: int, end: int) -> None:
        """Read bytes of a file and add them to the hash."""
        buffer = memoryview(bytearray(min(CHUNK, end - begin)))
        for position in range(begin, end, CHUNK):
            view = buffer[: min(CHUNK, end - position)]
            self._source.read_into(piece.file, position, view)
            self._hash.update(view)

    def _compare(self, entry: OutputEntry, piece: Piece, digest: str) -> None:
        if digest != piece.check:
            raise CorruptCheckpointError(
                f"{self._source.path(piece.file)} is damaged: {entry.tensor.kind} of {entry.tensor.name}, bytes "
                f"{piece.offset} to {piece.offset + piece.length}: their xxh3-64 is {digest}, not {piece.check}"
            )


class _Writer:
    """The conversion of source bytes to the dtype and order of the output, and their writing."""

    def __init__(self, out: IO[bytes], findings: Findings):
        self._out = out
        self._findings = findings
        self._buffer = bytearray()

    def put(self, stretch: Stretch, buffer: memoryview) -> None:
        """Write one stretch, cast if the output has another dtype; report tensors with NaN or inf."""
        tensor = stretch.parts[0][0].tensor
        if tensor.strides is None:
            self._put(stretch, buffer[stretch.begin : stretch.end])
            return
        width = itemsize(tensor.dtype)
        values = rows_of(buffer, width, tensor.shape, tensor.strides)
        step = max(1, CHUNK // max(1, tensor.nbytes // max(1, tensor.shape[0])))
        for first in range(0, tensor.shape[0], step):
            rows = values[first : first + step].copy().reshape(-1)
            self._put(stretch._replace(parts=[(stretch.parts[0][0], 0, rows.nbytes)]), rows)

    def _put(self, stretch: Stretch, data: Any) -> None:
        finite = not stretch.scan or all_finite(data, stretch.source)
        if not finite:
            self._findings.not_finite.update(_not_finite(stretch, data, stretch.source, 1, 1))
        if stretch.dtype == stretch.source:
            self._out.write(memoryview(data).cast("B"))
            return
        width, out_width = itemsize(stretch.source), itemsize(stretch.dtype)
        size = (stretch.end - stretch.begin) // width * out_width
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        result = memoryview(self._buffer)[:size]
        cast(data, stretch.source, stretch.dtype, result)
        if stretch.scan and not all_finite(result, stretch.dtype):
            names = set(_not_finite(stretch, result, stretch.dtype, width, out_width))
            self._findings.overflown.update(names - self._findings.not_finite)
        self._out.write(result)


def _not_finite(stretch: Stretch, data: Any, code: str, width: int, out_width: int) -> Iterator[str]:
    """Yield the names of tensors with NaN or inf in `data`, which has `out_width` bytes per `width` bytes of source."""
    values = as_integers(data, itemsize(code))
    size = itemsize(code)
    for entry, at, length in stretch.parts:
        begin = (at - stretch.begin) // width * out_width // size
        count = length // width * out_width // size
        if not all_finite(values[begin : begin + count], code):
            yield entry.tensor.name
