"""What a folder that holds a checkpoint can do; ``storage`` opens one, local or behind fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from ort_zero.errors import CorruptCheckpointError
from ort_zero.masking import masked

CHUNK = 8 << 20
"""Number of bytes that each worker has in flight at a time."""


_WEB = ("http://", "https://")


class Folder:
    """A folder that holds a checkpoint. Thread-safe.

    Attributes:
        url: the path or URL it was opened with, without a slash at its end.
        bytes_read: bytes that :meth:`read_into` and :meth:`read` have brought so far.
    """

    url: str
    bytes_read: int
    block = 1 << 20
    """Bytes that a sequential reader does best to ask for at once: locally, few enough that their checksum is computed
    from the processor's cache; of a store, as many as its connections bring together."""

    def __init__(self, url: str):
        self.url = url.rstrip("/") or "/"
        self.bytes_read = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The last part of its path, without the query of a web address, which may be a secret."""
        address = self.url.partition("?")[0] if self.url.startswith(_WEB) else self.url
        return address.rstrip("/").rsplit("/", 1)[-1]

    def path(self, name: str = "") -> str:
        """Return the path or URL of a file, for messages: secrets in a URL are masked."""
        shown = masked(self.url) if "://" in self.url else self.url
        return f"{shown}/{name}" if name else shown

    def child(self, name: str) -> Folder:
        """Return the folder `name` in this folder; it need not exist."""
        return type(self)(joined_url(self.url, name))

    def names(self) -> list[str]:
        """Return the names of the files and folders in it, sorted; an empty list if it does not exist."""
        raise NotImplementedError

    def folders(self) -> list[str]:
        """Return the names of the folders in it, sorted, links to folders included; an empty list if it is none."""
        raise NotImplementedError

    def modified(self, name: str) -> float | None:
        """Return when a file was written last, in seconds since 1970; None if there is none or nobody knows."""
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        """Return the size in bytes of a file, None if there is none.

        Raises:
            CheckpointError: a folder, FIFO, device or socket has the name.
        """
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        """Return True if the file `name` exists; False too for what has the name and is no regular file."""
        return self.size(name) is not None

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            CorruptCheckpointError: the file is missing or ends before.
        """
        raise NotImplementedError

    def read_scattered(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on: one request.

        Raises:
            CorruptCheckpointError: the file is missing or ends before.
        """
        content = memoryview(bytearray(sum(map(len, buffers))))
        self.read_into(name, offset, content)
        for buffer in buffers:
            buffer[:] = content[: len(buffer)]
            content = content[len(buffer) :]

    def read_many(self, reads: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        """Do as :meth:`read_scattered` for each (name, offset, buffers), several at a time where that is faster.

        Raises:
            CorruptCheckpointError: a file is missing or ends before.
        """
        for name, offset, buffers in reads:
            self.read_scattered(name, offset, buffers)

    def read(self, name: str, offset: int = 0, length: int | None = None, *, limit: int | None = None) -> bytes:
        """Return `length` bytes from `offset` on, by default all to the end.

        Args:
            name: name of the file.
            offset: bytes to skip.
            length: bytes to return.
            limit: most bytes that the file may have, if `length` is not given.

        Raises:
            CorruptCheckpointError: the file is missing, ends before, or is longer than `limit`.
            CheckpointError: it is no regular file.
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

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading, seekable.

        Raises:
            CorruptCheckpointError: it is missing.
        """
        raise NotImplementedError

    def make(self) -> None:
        """Make the folder and its parents; it may exist."""
        raise NotImplementedError

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Give a binary stream whose bytes appear as `name` only by :meth:`publish`; on an exception nothing is left.

        Args:
            name: final name.
            token: tells this writer from others who may write the same name.
            durable: have the bytes on the disk itself at the end; object stores always do.
            size: number of bytes that will be written, if known: their room may be reserved at once.
        """
        raise NotImplementedError

    takes_ranges = False
    """True if several may write one file at the same time, see :meth:`writing_from`."""

    @contextmanager
    def writing_from(self, name: str, token: str, offset: int, size: int = 0) -> Iterator[IO[bytes]]:
        """Give a stream into the file that :meth:`writing` would write, from `offset` bytes on; the rest stays.

        Several threads and ranks may do so at a time. The file stays after an exception: who began it discards it.
        `size` is that of :meth:`writing`, from `offset` on.
        """
        raise NotImplementedError

    def publish(self, name: str, token: str, to: str | None = None) -> None:
        """Give what :meth:`writing` left its final name (or the name `to`), in place of what had it."""
        raise NotImplementedError

    def duplicate(self, name: str, to: str, token: str) -> None:
        """Give the content of the file `name` the further name `to`, in place of what had it, in one step.

        Args:
            name: an existing file, which stays.
            to: the further name.
            token: tells this writer from others who may write the same name.
        """
        raise NotImplementedError

    def discard(self, name: str, token: str) -> None:
        """Remove what :meth:`writing` left, if anything."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is fine.

        Raises:
            CheckpointError, OSError: it cannot be removed.
        """
        raise NotImplementedError

    def remove_if_possible(self, name: str) -> None:
        """Remove a file that harms nobody where it stays."""
        with suppress(OSError):
            self.remove(name)

    def end_left_over_uploads(self, left_over: Callable[[str], bool], below: bool = False) -> None:
        """End the uploads into it that a killed process has begun: a store keeps their parts, and lists no object.

        Args:
            left_over: returns whether the name of an upload's object is that of a left-over.
            below: end those into the folders inside it too, by the last part of their names.
        """

    def write(self, name: str, data: bytes, token: str, durable: bool = False) -> None:
        """Write a whole small file and publish it.

        Args:
            name: final name; what has it is replaced.
            data: content.
            token: tells this writer from others who may write the same name.
            durable: have content and name on the disk itself.

        Raises:
            CheckpointError: it cannot be written; nothing is left of it.
        """
        try:
            self._write(name, data, token, durable)
        except FileNotFoundError:
            # another process that saves there has taken the partial file for one that a killed save left
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
        """Have the names that :meth:`publish` gave on the disk itself; object stores always do."""

    def _count(self, number: int) -> None:
        with self._lock:
            self.bytes_read += number


def joined_url(url: str, name: str) -> str:
    """Return the URL of what is called `name` in the folder `url`; a web address keeps its query at its end."""
    address, question, query = url.partition("?") if url.startswith(_WEB) else (url, "", "")
    return f"{address.rstrip('/')}/{name}{question}{query}"
