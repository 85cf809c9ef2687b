"""Reads slices of files and writes files under their final name only when they are complete; local or through fsspec.

A local folder is read with ``pread`` into buffers that are used again, not through memory maps: a file that is too
short is then an error with a name and not a SIGBUS, and what was read can be counted.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from ort_zero.checkpoint.preallocation import reserve_blocks
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.masking import masked
from ort_zero.utils.atomic_write import partial_name, removed_on_error

CHUNK = 8 << 20
"""Number of bytes that each worker has in flight at a time."""
_MOST_OPEN = 256
"""Maximum number of files of a folder that are held open between reads; systems allow a process 1024 or so."""
_SPECIAL = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Folder:
    """A folder that holds a checkpoint. Thread-safe.

    Attributes:
        url: the path or URL it was opened with, without a slash at its end.
        bytes_read: bytes that :meth:`read_into` and :meth:`read` have brought so far.
    """

    url: str
    bytes_read: int

    def __init__(self, url: str):
        self.url = url.rstrip("/") or "/"
        self.bytes_read = 0
        self._lock = threading.Lock()

    def path(self, name: str = "") -> str:
        """Return the path or URL of a file, for messages: secrets in a URL are masked."""
        shown = masked(self.url) if "://" in self.url else self.url
        return f"{shown}/{name}" if name else shown

    def child(self, name: str) -> Folder:
        """Return the folder `name` in this folder; it need not exist."""
        return open_folder(_joined(self.url, name))

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
        try:
            return self.size(name) is not None
        except CheckpointError:
            return False

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
        """Remove a file; a missing one is fine."""
        raise NotImplementedError

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
            with self.writing(name, token, durable) as stream:
                stream.write(data)
            self.publish(name, token)
        except BaseException:
            self.discard(name, token)
            raise
        if durable:
            self.settle()

    def settle(self) -> None:
        """Have the names that :meth:`publish` gave on the disk itself; object stores always do."""

    def _count(self, number: int) -> None:
        with self._lock:
            self.bytes_read += number


class LocalFolder(Folder):
    """A folder of the local file system."""

    def __init__(self, url: str):
        super().__init__(url)
        self._root = Path(self.url)
        self._descriptors: dict[str, int] = {}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    def names(self) -> list[str]:
        """List the folder; one that does not exist has no names."""
        try:
            return sorted(os.listdir(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self) -> list[str]:
        """List the folders in it; what the user may not read has none."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def modified(self, name: str) -> float | None:
        """Return what the file system says."""
        try:
            return (self._root / name).stat().st_mtime
        except OSError:
            return None

    def size(self, name: str) -> int | None:
        """Return the size in bytes that the file system reports, None if there is no such file."""
        try:
            found = (self._root / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._refuse_special(name, found)
        return found.st_size

    def _refuse_special(self, name: str, found: os.stat_result) -> None:
        """Raise for what is no regular file: a FIFO or a device would block its reader, or never end."""
        if not stat.S_ISREG(found.st_mode):
            kind = next((text for test, text in _SPECIAL if test(found.st_mode)), "not a regular file")
            raise CheckpointError(f"{self.path(name)} is {kind}, where a file is needed; remove it")

    def _open_descriptor(self, name: str) -> int:
        """Return a new descriptor of a regular file."""
        try:
            # without O_NONBLOCK, opening a FIFO waits for its writer
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.path(name)} is missing") from None
        except OSError as error:
            raise self._unreadable(name, error) from error
        try:
            self._refuse_special(name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by ``preadv``, over a descriptor that stays open as long as this object lives.

        Of the first :data:`_MOST_OPEN` files, that is: a universal checkpoint has three for each parameter.
        """
        descriptor, stays = self._descriptor(name)
        try:
            self._read_into(name, descriptor, offset, buffer)
        finally:
            if not stays:
                os.close(descriptor)

    def _read_into(self, name: str, descriptor: int, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(name, error) from error
            if not got:
                raise CorruptCheckpointError(
                    f"{self.path(name)} is truncated: it ends at byte {offset + done}, "
                    f"bytes up to {offset + len(buffer)} are needed"
                )
            done += got
        self._count(done)

    def read_scattered(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers by one ``preadv``."""
        total = sum(map(len, buffers))
        descriptor, stays = self._descriptor(name)
        try:
            got = os.preadv(descriptor, buffers, offset)
        except OSError as error:
            raise self._unreadable(name, error) from error
        finally:
            if not stays:
                os.close(descriptor)
        if got == total:
            self._count(got)
            return
        for buffer in buffers:  # the kernel may bring less at a time, and says at which byte a file ends
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def _descriptor(self, name: str) -> tuple[int, bool]:
        """Return a descriptor of a file, and whether it stays open."""
        found = self._descriptors.get(name)
        if found is not None:
            return found, True
        with self._lock:
            if name not in self._descriptors:
                if len(self._descriptors) >= _MOST_OPEN:
                    return self._open_descriptor(name), False
                self._descriptors[name] = self._open_descriptor(name)
            return self._descriptors[name], True

    def _unreadable(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot read {self.path(name)}: {error.strerror or error}")

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the file system for reading."""
        return os.fdopen(self._open_descriptor(name), "rb")

    def make(self) -> None:
        """Make the folder and its parents on the file system; it may exist."""
        self._root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Give an unbuffered stream into a hidden file beside the final place, which an exception removes."""
        path = self._root / partial_name(name, token)
        try:
            with removed_on_error(path, durable=durable, buffering=0) as raw:
                reserve_blocks(raw.fileno(), 0, size)
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    takes_ranges = True

    @contextmanager
    def writing_from(self, name: str, token: str, offset: int, size: int = 0) -> Iterator[IO[bytes]]:
        """Give an unbuffered stream into the hidden file, which is made if nobody has yet."""
        try:
            descriptor = os.open(self._root / partial_name(name, token), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb", buffering=0) as raw:
                reserve_blocks(descriptor, offset, size)
                raw.seek(offset)
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    def publish(self, name: str, token: str, to: str | None = None) -> None:
        """Rename the hidden file, which replaces what had the name in one step."""
        os.replace(self._root / partial_name(name, token), self._root / (to or name))

    def duplicate(self, name: str, to: str, token: str) -> None:
        """Link the file a second time, or copy it where the file system has no links."""
        partial = self._root / partial_name(to, token)
        partial.unlink(missing_ok=True)
        try:
            os.link(self._root / name, partial)
        except OSError:
            shutil.copyfile(self._root / name, partial)
        os.replace(partial, self._root / to)

    def settle(self) -> None:
        """Call fsync on the folder, so that renames outlive a loss of power."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self, name: str, token: str) -> None:
        """Remove the hidden file that :meth:`writing` left, if there is one."""
        (self._root / partial_name(name, token)).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file from the file system; a missing one is fine."""
        (self._root / name).unlink(missing_ok=True)


class _WholeWrites:
    """A raw file whose ``write`` writes everything: the kernel may take less at a time (2 GiB at most)."""

    def __init__(self, raw: Any):
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def writelines(self, views: Sequence[Any]) -> None:
        """Write buffers of bytes, 1024 at most, by one call."""
        done = os.writev(self._raw.fileno(), views) if views else 0
        for view in views:
            if done < len(view):
                self.write(view[done:])
            done = max(0, done - len(view))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class RemoteFolder(Folder):
    """A folder behind fsspec (``s3://``, ``gs://``, ``memory://``, ...).

    An object appears when its upload ends, so nothing incomplete is ever seen under its name, but there is no rename:
    the partial name is an object of its own, which :meth:`publish` moves (on the server where the store can copy).
    """

    def __init__(self, url: str):
        super().__init__(url)
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot open {self.url}: {error}") from None  # its own message may hold secrets

    def _at(self, name: str) -> str:
        return _joined(self._root.rstrip("/"), name) if name else self._root

    def names(self) -> list[str]:
        """List the objects under the URL, past what fsspec remembers of an earlier listing."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found if path.rstrip("/") != self._root})

    def folders(self) -> list[str]:
        """List the common beginnings of the names of objects under the URL."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = (about["name"].rstrip("/") for about in found if about["type"] == "directory")
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root.rstrip("/")})

    def modified(self, name: str) -> float | None:
        """Return what the store says; not every kind of store does."""
        try:
            return self._fs.modified(self._at(name)).timestamp()
        except (OSError, NotImplementedError, AttributeError):
            return None

    def size(self, name: str) -> int | None:
        """Return the size in bytes that the store reports, None if there is no such object."""
        try:
            return self._fs.size(self._at(name))
        except FileNotFoundError:
            return None

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by one ranged request."""
        if not len(buffer):
            return
        try:
            data = self._fs.cat_file(self._at(name), start=offset, end=offset + len(buffer))
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.path(name)} is missing") from None
        if len(data) != len(buffer):
            raise CorruptCheckpointError(
                f"{self.path(name)} is truncated: it ends at byte {offset + len(data)}, "
                f"bytes up to {offset + len(buffer)} are needed"
            )
        buffer[:] = data
        self._count(len(data))

    def open(self, name: str) -> IO[bytes]:
        """Open an object for reading."""
        try:
            return self._fs.open(self._at(name), "rb")
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.path(name)} is missing") from None

    def make(self) -> None:
        """Make the folder where the store knows folders; it may exist."""
        self._fs.makedirs(self._root, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Give a stream into an object of its own, which is uploaded when the block ends and not if it raises."""
        path = self._at(partial_name(name, token))
        try:
            with self._upload(path) as stream:
                yield stream
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error}") from None  # likewise

    @contextmanager
    def _upload(self, path: str) -> Iterator[IO[bytes]]:
        stream = self._fs.open(path, "wb", block_size=CHUNK)
        try:
            yield stream
            stream.close()
        except BaseException:
            if hasattr(stream, "discard"):
                with suppress(OSError):  # the error that brought us here says more
                    stream.discard()
            # closing would upload what there is; a file in memory cannot be marked, and closing it does nothing
            with suppress(AttributeError):
                stream.closed = True
            self._forget(path)
            raise

    def _forget(self, path: str) -> None:
        with suppress(OSError):
            self._fs.rm_file(path)

    def publish(self, name: str, token: str, to: str | None = None) -> None:
        """Move the object to its final name, on the server where the store can copy."""
        self._fs.mv(self._at(partial_name(name, token)), self._at(to or name))

    def duplicate(self, name: str, to: str, token: str) -> None:
        """Copy the object, on the server where the store can."""
        self._fs.copy(self._at(name), self._at(to))

    def discard(self, name: str, token: str) -> None:
        """Remove the object that :meth:`writing` left, if there is one."""
        self._forget(self._at(partial_name(name, token)))

    def remove(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        self._forget(self._at(name))


def _joined(url: str, name: str) -> str:
    """Return the URL of what is called `name` in the folder `url`; a web address keeps its query at its end."""
    address, question, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    return f"{address.rstrip('/')}/{name}{question}{query}"


def open_folder(url: str | os.PathLike) -> Folder:
    """Return the folder behind a local path or an fsspec URL; it need not exist yet."""
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return RemoteFolder(text) if "://" in text else LocalFolder(text)
