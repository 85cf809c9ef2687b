"""Write output files: read, check, cast and write some tensors at a time in each thread.

A thread holds one window of the source, at most 8 MiB of a local folder. Pieces that fit into a window are read
together; a larger piece passes through in blocks. Whole pieces are read, so that every byte is read once.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import groupby, zip_longest
from typing import IO, TYPE_CHECKING, Any

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputEntry, OutputFile
from ort_zero.checkpoint.files.casting import all_finite, cast, rows_of
from ort_zero.checkpoint.files.dtypes import itemsize, torch_dtype
from ort_zero.checkpoint.files.storage import CHUNK, Folder, LocalFolder
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, Part, ReadRequest, WantedBytes
from ort_zero.checkpoint.records import BUFFER, File, Piece

if TYPE_CHECKING:
    import torch

_MIN_WINDOW = 1 << 20  # bytes
_BYTES_PER_FILE = 32 << 10
"""Bytes of a window per source file: a window of ZeRO-3 has a part of each file, and every read has a fixed cost."""
_MIN_JOB = 4 << 20
_JOBS_PER_THREAD = 8
"""Number of jobs that a thread does: threads that are done early take the jobs that are left."""


class _Stopped(Exception):
    """Another thread failed or the user interrupted; that other error is raised, not this one."""


class Streamer:
    """A writer of output files from one checkpoint.

    Attributes:
        parts: the parts that were read of records with a CRC-32.
        not_finite: names of parameters whose stored or merged values hold NaN or inf.
        overflown: names of parameters with finite values that the cast turned into inf.

    Args:
        token: part of the names of this run's partial files.
        merges: LoRA's matrices to add, by name of the base weight.
        advance: called with the number of source bytes that were written.
    """

    def __init__(
        self,
        source: Folder,
        files: Mapping[str, File],
        target: Folder,
        token: str,
        *,
        merges: Mapping[str, Merge] | None = None,
        verify: bool = True,
        advance: Callable[[int], object] = lambda number: None,
    ):
        self.parts: list[Part] = []
        self.not_finite: set[str] = set()
        self.overflown: set[str] = set()
        self._source, self._files = source, files
        self._target, self._token = target, token
        self._merges = merges or {}
        self._verify = verify
        self._advance = advance
        self._stop = threading.Event()
        self._window = max(CHUNK, source.block)
        if isinstance(source, LocalFolder):
            self._window = min(CHUNK, max(_MIN_WINDOW, _BYTES_PER_FILE * len(files)))

    def write(self, files: Sequence[OutputFile], workers: int) -> None:
        """Write `files` under partial names with `workers` threads, which share files if the destination allows it."""
        size = max(_MIN_JOB, sum(file.size for file in files) // (_JOBS_PER_THREAD * workers))
        with ThreadPoolExecutor(workers, thread_name_prefix="aggregate") as pool:
            try:
                jobs = [pool.submit(*job) for job in self._jobs(files, size, workers)]
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                failed = [error for job in done if (error := job.exception()) is not None]
                if failed:
                    raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _jobs(self, files: Sequence[OutputFile], size: int, workers: int) -> Iterator[tuple[Any, ...]]:
        """Yield functions and their arguments; neighbours write different files, since the kernel locks a file."""
        jobs: list[list[tuple[Any, ...]]] = []
        for file in files:
            if self._target.takes_ranges and file.format == "safetensors":
                jobs.append([(self._write_part, file, part) for part in parts_of(file, size)])
            else:
                jobs.append([(self._write_whole, file)])
        for first in range(0, len(jobs), workers):
            for neighbours in zip_longest(*jobs[first : first + workers]):
                yield from filter(None, neighbours)

    def _write_part(self, file: OutputFile, entries: Sequence[OutputEntry]) -> None:
        first = not entries or entries[0] is file.entries[0]
        begin = 0 if first else len(file.header) + entries[0].offset
        with self._target.writing_from(file.name, self._token, begin) as out:
            if first:
                out.write(file.header)
            self._copy(entries, out)

    def _write_whole(self, file: OutputFile) -> None:
        with self._target.writing(file.name, self._token, size=file.size) as out:
            if file.format == "safetensors":
                out.write(file.header)
                self._copy(file.entries, out)
                return
            import torch  # only for torch's own format

            place = self._target.url if isinstance(self._target, LocalFolder) else None
            with tempfile.TemporaryFile(prefix=".ort_zero_", dir=place) as data:
                self._copy(file.entries, data)
                data.flush()
                torch.save(_mapped(file, data.fileno()), out)

    def _copy(self, entries: Sequence[OutputEntry], out: IO[bytes]) -> None:
        reader = CheckedReader(self._source, self._files, self._verify)
        buffer = memoryview(bytearray(min(self._window, sum(entry.tensor.nbytes for entry in entries))))
        waiting: list[tuple[OutputEntry, Piece]] = []
        filled = 0

        def flush() -> None:
            nonlocal filled
            self._copy_window(waiting, reader, buffer, out)
            waiting.clear()
            filled = 0

        for entry in entries:
            merge = self._merges.get(entry.tensor.name)
            if merge is not None or entry.tensor.strides is not None:
                flush()
                self._copy_alone(entry, merge, reader, out)
                continue
            for piece in entry.tensor.pieces:
                if filled + piece.length > len(buffer):
                    flush()
                if piece.length <= len(buffer):
                    waiting.append((entry, piece))
                    filled += piece.length
                    continue
                for block in reader.blocks(entry.tensor, piece):
                    self._put(entry, block, out)
        flush()
        self.parts.extend(reader.parts)

    def _copy_window(
        self, pieces: list[tuple[OutputEntry, Piece]], reader: CheckedReader, buffer: memoryview, out: IO[bytes]
    ) -> None:
        wanted, end = [], 0
        for entry, piece in pieces:
            wanted.append(WantedBytes(entry.tensor, piece, 0, piece.length, buffer[end : end + piece.length]))
            end += piece.length
        reader.read_pieces(wanted)
        begin = 0
        for entry, group in groupby(pieces, key=lambda item: item[0]):
            end = begin + sum(piece.length for _, piece in group)
            self._put(entry, buffer[begin:end], out)
            begin = end

    def _copy_alone(self, entry: OutputEntry, merge: Merge | None, reader: CheckedReader, out: IO[bytes]) -> None:
        """Write a tensor that is merged with LoRA's matrices, or that is not row-major in its file."""
        if merge is not None:
            for rows in _merged_rows(merge, reader, entry.dtype):
                if not all_finite(rows, entry.dtype):
                    self.not_finite.add(entry.tensor.name)
                out.write(rows)
            return
        tensor = entry.tensor
        assert tensor.strides is not None
        data = b"".join(bytes(block) for block in reader.blocks(tensor, tensor.pieces[0]))
        values = rows_of(data, itemsize(tensor.dtype), tensor.shape, tensor.strides)
        step = max(1, CHUNK // max(1, tensor.nbytes // max(1, tensor.shape[0])))
        for first in range(0, tensor.shape[0], step):
            self._put(entry, values[first : first + step].copy().reshape(-1).view("u1").data, out)

    def _put(self, entry: OutputEntry, data: memoryview, out: IO[bytes]) -> None:
        """Write elements of a tensor, cast if the output has another dtype; report NaN and inf in weights."""
        if self._stop.is_set():
            raise _Stopped
        source, dtype = entry.tensor.dtype, entry.dtype
        is_scanned = entry.tensor.kind != BUFFER and not entry.tensor.is_optimizer_state
        finite = not is_scanned or all_finite(data, source)
        if not finite:
            self.not_finite.add(entry.tensor.name)
        self._advance(len(data))
        if dtype == source:
            out.write(data)
            return
        result = memoryview(bytearray(len(data) // itemsize(source) * itemsize(dtype)))
        cast(data, source, dtype, result)
        if is_scanned and finite and not all_finite(result, dtype):
            self.overflown.add(entry.tensor.name)
        out.write(result)


def parts_of(file: OutputFile, size: int) -> Iterator[Sequence[OutputEntry]]:
    """Yield the entries of a file in parts of about `size` bytes; no entry is divided."""
    begin, filled = 0, 0
    for index, entry in enumerate(file.entries):
        if filled and filled + entry.nbytes > size:
            yield file.entries[begin:index]
            begin, filled = index, 0
        filled += entry.nbytes
    yield file.entries[begin:]


def _mapped(file: OutputFile, descriptor: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a data section by name, with tied tensors, as views of the mapped file."""
    import torch

    # copy-on-write, since torch warns about read-only memory; nothing is written, so nothing is copied
    content: Any = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if file.data_bytes else b""
    state = {}
    for entry in file.entries:
        dtype, count = torch_dtype(entry.dtype), entry.tensor.elements
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset)
        state[entry.name] = flat.reshape(entry.tensor.shape)
    state.update({alias: state[name] for alias, name in file.aliases.items()})
    return state


def _merged_rows(merge: Merge, reader: CheckedReader, dtype: str) -> Iterator[memoryview]:
    """Yield the bytes of a base weight with LoRA's matrices added, a few rows at a time.

    Sums are computed in float32 and rounded once, to `dtype`. The base weight lies in memory in its stored dtype.
    """
    import torch

    base = torch.empty(merge.base.shape, dtype=torch_dtype(merge.base.dtype))
    a, b = (torch.empty(stored.shape, dtype=torch.float32) for stored in (merge.a, merge.b))
    reader.read(ReadRequest(tensor, into.view(-1)) for tensor, into in ((merge.base, base), (merge.a, a), (merge.b, b)))
    step = max(1, CHUNK // (4 * max(1, base.shape[1])))
    for row in range(0, base.shape[0], step):
        part = slice(row, row + step)
        update = (b @ a[:, part]).T if merge.transposed else b[part] @ a
        result = (base[part].float() + merge.scale * update).to(torch_dtype(dtype))
        yield result.contiguous().view(-1).view(torch.uint8).numpy().data
