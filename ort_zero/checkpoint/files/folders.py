"""Define the interface of a local or remote folder of a checkpoint; ``storage`` opens one."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from isal.isal_zlib import crc32

from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.atomic_write import partial_name
from ort_zero.utils.masking import masked

CHUNK = 8 << 20
"""Maximum number of bytes that each thread reads or writes at a time."""
_STREAM_BUFFER = 1 << 18
"""Number of bytes that a stream of :meth:`Folder.open` reads at a time."""
_WEB = ("http://", "https://")
_thread = threading.local()


class Folder:
    """The folder of a checkpoint, with the operations on its files. Thread-safe.

    Attributes:
        url: path or URL of the folder, without a slash at the end.
        bytes_read: bytes that :meth:`read_into` and :meth:`read` have read so far.
    """

    url: str
    bytes_read: int
    block = 1 << 20
    """Best size in bytes of a sequential read: locally, small enough that the checksum is computed in the processor's
    cache; for a store, as much as its connections transfer together."""
    parallel_reads = 1
    """Number of files that are best read at a time."""

    def __init__(self, url: str):
        self.url = url.rstrip("/") or "/"
        self.bytes_read = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The last part of the path, without the query of a web address, which may contain a secret."""
        address = self.url.partition("?")[0] if self.url.startswith(_WEB) else self.url
        return address.rstrip("/").rsplit("/", 1)[-1]

    def path(self, name: str = "") -> str:
        """Return the path or URL of the folder or of a file in it for messages; secrets in a URL are masked."""
        shown = masked(self.url) if "://" in self.url else self.url
        return f"{shown}/{name}" if name else shown

    def child(self, name: str) -> Folder:
        """Return the folder `name` in this folder; the folder need not exist."""
        return type(self)(joined_url(self.url, name))

    def names(self) -> list[str]:
        """Return the sorted names of the files and folders in this folder; an empty list if there is no such folder."""
        raise NotImplementedError

    def folders(self) -> list[str]:
        """Return the sorted names of inner folders and links to folders; an empty list if there is no such folder."""
        raise NotImplementedError

    def modified(self, name: str) -> float | None:
        """Return the time of a file's last change in seconds since 1970; None if the file or its time is unknown."""
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        """Return the size in bytes of a file, None if no file has the name.

        Raises:
            CheckpointError: a folder, FIFO, device or socket has the name.
        """
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        """Return True if `name` is an existing regular file."""
        return self.size(name) is not None

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a file from `offset` on.

        Raises:
            CorruptCheckpointError: the file is missing or too short.
        """
        raise NotImplementedError

    def read(self, name: str, offset: int = 0, length: int | None = None, *, limit: int | None = None) -> bytes:
        """Return `length` bytes of a file from `offset` on, by default all bytes to the end.

        Args:
            limit: maximum size of the file in bytes, checked if `length` is None.
        """
        if length is None:
            size = self.size(name)
            if size is None:
                raise CorruptCheckpointError(f"{self.path(name)} is missing")
            if limit is not None and size > limit:
                raise CorruptCheckpointError(f"{self.path(name)} has {size} bytes, more than the {limit} it may have")
            length = size - offset
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def blocks(self, name: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a file from `start` to `end`, in memory that the next block of this thread overwrites."""
        if len(getattr(_thread, "block", b"")) < self.block:
            _thread.block = memoryview(bytearray(self.block))
        for position in range(start, end, self.block):
            view = _thread.block[: min(self.block, end - position)]
            self.read_into(name, position, view)
            yield view

    def crc32(
        self, name: str, start: int, end: int, crc: int = 0, advance: Callable[[int], Any] = lambda count: None
    ) -> int:
        """Return the CRC-32 of a file's bytes from `start` to `end`, continued from the CRC-32 of earlier bytes.

        Args:
            crc: CRC-32 of the bytes before.
            advance: called with the number of bytes of each read.
        """
        for view in self.blocks(name, start, end):
            crc = crc32(view, crc)
            advance(len(view))
        return crc

    def open(self, name: str, start: int = 0, length: int | None = None) -> IO[bytes]:
        """Open a file, or `length` bytes of a file from `start` on, for reading, seekable."""
        size = self.size(name)
        if size is None:
            raise CorruptCheckpointError(f"{self.path(name)} is missing")
        return io.BufferedReader(_Range(self, name, start, size - start if length is None else length), _STREAM_BUFFER)

    def partial(self, name: str, token: str) -> str:
        """Return the name of the incomplete file of :meth:`writing`; every writer of a file calls this.

        Raises:
            CheckpointError: `name`, which may come from a checkpoint, leads out of this folder.
        """
        if not all(map(is_plain_name, name.split("/"))):
            raise CheckpointError(f"{name!r} cannot be the name of a file in {self.path()}")
        return partial_name(name, token)

    def make(self) -> None:
        """Make the folder and its parents; the folder may exist."""
        raise NotImplementedError

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Yield a binary stream whose bytes :meth:`publish` makes visible as `name`; an exception removes them.

        Args:
            token: part of the partial name, different for each writer of `name`.
            durable: flush the bytes to the disk at the end; object stores always do.
            size: number of bytes to be written, 0 if unknown: a store needs larger parts for a larger object.
        """
        raise NotImplementedError

    takes_ranges = False
    """True if several threads and ranks may write one file at the same time, see :meth:`writing_from`."""

    @contextmanager
    def writing_from(self, name: str, token: str, offset: int) -> Iterator[IO[bytes]]:
        """Yield a stream into the partial file of :meth:`writing`, from byte `offset` on; other bytes stay.

        Several threads and ranks may call it at a time. The file stays after an exception: the caller discards it.
        """
        raise NotImplementedError

    def publish(self, name: str, token: str) -> None:
        """Rename the partial file of :meth:`writing` to its final name; replace a file of that name."""
        raise NotImplementedError

    def discard(self, name: str, token: str) -> None:
        """Remove the partial file of :meth:`writing`, if it exists."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file; a missing file is no error.

        Raises:
            CheckpointError, OSError: the file cannot be removed.
        """
        raise NotImplementedError

    def remove_if_possible(self, name: str) -> None:
        """Remove a file, and ignore an OSError: the file does no harm if it stays."""
        with suppress(OSError):
            self.remove(name)

    def write(self, name: str, data: bytes, token: str, durable: bool = False) -> None:
        """Write a whole small file and publish it.

        Args:
            token: part of the partial name, different for each writer of `name`.

        Raises:
            CheckpointError: the file cannot be written; no partial file stays.
        """
        try:
            self._write(name, data, token, durable)
        except FileNotFoundError:
            # another process that saves into this folder removed the partial file as a left-over of a killed save
            self._write(name, data, token, durable)
        if durable:
            self.settle()

    def _write(self, name: str, data: bytes, token: str, durable: bool) -> None:
        try:
            with self.writing(name, token, durable) as stream:
                stream.write(data)
            self.publish(name, token)
        except BaseException:
            self.discard(name, token)
            raise

    def settle(self) -> None:
        """Flush the renames of :meth:`publish` to the disk; object stores always do."""

    def _count(self, number: int) -> None:
        with self._lock:
            self.bytes_read += number


def joined_url(url: str, name: str) -> str:
    """Return the URL of the file or folder `name` in the folder `url`; the query of a web address stays at the end."""
    address, question, query = url.partition("?") if url.startswith(_WEB) else (url, "", "")
    return f"{address.rstrip('/')}/{name}{question}{query}"


class _Range(io.RawIOBase):
    """A stream of the `size` bytes of a file from byte `start` on."""

    def __init__(self, folder: Folder, name: str, start: int, size: int):
        super().__init__()
        self._folder, self._name, self._start, self._size = folder, name, start, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(22, "the position is before the start of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._position))
        self._folder.read_into(self._name, self._start + self._position, view[:length])
        self._position += length
        return length
