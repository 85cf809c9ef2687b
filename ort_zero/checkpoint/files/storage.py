"""Read slices of files, and write files that get their final name when they are complete; locally or through fsspec.

A local folder is read with ``pread`` into reused buffers, not through memory maps. So a file that is too short causes
an error with its name and not a SIGBUS, and the bytes that were read can be counted.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from isal.isal_zlib import crc32

from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.atomic_write import partial_name, removed_on_error
from ort_zero.utils.masking import masked, masked_as_in

CHUNK = 8 << 20
"""Maximum number of bytes that each thread reads or writes at a time."""
_WEB = ("http://", "https://")
_thread = threading.local()
_MAX_OPEN = 256
"""Maximum number of files of a folder that stay open between reads; many systems allow a process 1024."""
_SPECIAL = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


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
        """Return the size in bytes of a file, None if no file has the name."""
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        """Return True if `name` is an existing regular file."""
        return self.size(name) is not None

    def wrong_size(self, name: str, expected: int) -> str | None:
        """Return a sentence if a file is missing or has another size than its manifest says, else None."""
        size = self.size(name)
        if size == expected:
            return None
        if size is None:
            return f"{self.path(name)} is missing"
        kind = "empty" if not size else "truncated" if size < expected else "too long"
        return f"{self.path(name)} is {kind}: it has {size} bytes, the manifest says {expected}"

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a file from `offset` on."""
        raise NotImplementedError

    def read(self, name: str, offset: int = 0, length: int | None = None, *, limit: int | None = None) -> bytes:
        """Return `length` bytes of a file from `offset` on; by default all to the end, `limit` at most."""
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
        """Return the CRC-32 of a file's bytes from `start` to `end`, continued from `crc`; `advance` gets each size."""
        for view in self.blocks(name, start, end):
            crc = crc32(view, crc)
            advance(len(view))
        return crc

    def partial(self, name: str, token: str) -> str:
        """Return the name of the incomplete file of :meth:`writing`; every writer of a file calls this."""
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
        """Remove a file; a missing file is no error."""
        raise NotImplementedError

    def remove_if_possible(self, name: str) -> None:
        """Remove a file, and ignore an OSError: the file does no harm if it stays."""
        with suppress(OSError):
            self.remove(name)

    def write(self, name: str, data: bytes, token: str, durable: bool = False) -> None:
        """Write a whole small file and publish it."""
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
        try:
            return sorted(os.listdir(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path()}: {error.strerror or error}") from error

    def folders(self) -> list[str]:
        """List the inner folders with ``os.scandir``; return an empty list for a folder that the user may not read."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError:
            return []

    def modified(self, name: str) -> float | None:
        try:
            return (self._root / name).stat().st_mtime
        except OSError:
            return None

    def size(self, name: str) -> int | None:
        status = self._status(name)
        if status is None:
            return None
        self._refuse_special(name, status)
        return status.st_size

    def exists(self, name: str) -> bool:
        status = self._status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return (self._root / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as circular links, or a name that is too long
            raise self._unreadable(name, error) from error

    def _refuse_special(self, name: str, status: os.stat_result) -> None:
        """Raise CheckpointError unless `name` is a regular file: a FIFO or a device may block a read or never end."""
        if not stat.S_ISREG(status.st_mode):
            kind = next((text for test, text in _SPECIAL if test(status.st_mode)), "not a regular file")
            raise CheckpointError(f"{self.path(name)} is {kind}, where a file is needed; remove it")

    def _open_descriptor(self, name: str) -> int:
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
        """Fill `buffer` by ``preadv``; descriptors of the first :data:`_MAX_OPEN` files stay open with this object.

        Other files are opened for each read: a universal checkpoint has three files per parameter.
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
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(name, error) from error
            if not count:
                raise CorruptCheckpointError(
                    f"{self.path(name)} is truncated: it ends at byte {offset + done}, "
                    f"bytes up to {offset + len(buffer)} are needed"
                )
            done += count
        self._count(done)

    def _descriptor(self, name: str) -> tuple[int, bool]:
        """Return a descriptor of a file, and True if the descriptor stays open."""
        descriptor = self._descriptors.get(name)
        if descriptor is not None:
            return descriptor, True
        with self._lock:
            if name not in self._descriptors:
                if len(self._descriptors) >= _MAX_OPEN:
                    return self._open_descriptor(name), False
                self._descriptors[name] = self._open_descriptor(name)
            return self._descriptors[name], True

    def _unreadable(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot read {self.path(name)}: {error.strerror or error}")

    def make(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        path = self._root / self.partial(name, token)
        try:
            with removed_on_error(path, durable=durable) as raw:
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    takes_ranges = True

    @contextmanager
    def writing_from(self, name: str, token: str, offset: int) -> Iterator[IO[bytes]]:
        try:
            descriptor = os.open(self._root / self.partial(name, token), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb", buffering=0) as raw:
                raw.seek(offset)
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    def publish(self, name: str, token: str) -> None:
        os.replace(self._root / self.partial(name, token), self._root / name)

    def settle(self) -> None:
        descriptor = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self, name: str, token: str) -> None:
        (self._root / self.partial(name, token)).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)


class _WholeWrites:
    """A raw file whose ``write`` writes all bytes: one call of the kernel may write fewer, and 2 GiB at most."""

    def __init__(self, raw: Any):
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def writelines(self, views: Sequence[Any]) -> None:
        """Write at most 1024 buffers of bytes by one call of ``writev``."""
        done = os.writev(self._raw.fileno(), views) if views else 0
        for view in views:
            if done < len(view):
                self.write(view[done:])
            done = max(0, done - len(view))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


# ---- behind fsspec ------------------------------------------------------------------------------------------------

RANGE_BYTES = CHUNK
"""Maximum number of bytes of one ranged request; the requests of one read are sent together."""
_MAX_PARTS = 5_000
"""Maximum number of parts of an upload; S3 takes 10,000."""
_PART_OF_UNKNOWN = 8 * CHUNK
"""Bytes of a part of an upload whose size is unknown."""
_SECONDS_TO_REMOVE = 10
"""Maximum seconds to remove one object: an object that stays is hidden, and the next run removes it."""
_Result = TypeVar("_Result")


def _masking(verb: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Wrap a method of a folder: errors of the library become CheckpointErrors without secrets, which say `verb`."""

    def wrapped(method: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(method)
        def call(self: RemoteFolder, *args: Any, **options: Any) -> _Result:
            try:
                return method(self, *args, **options)
            except CheckpointError:
                raise
            except Exception as error:  # libraries below fsspec raise any class
                failure = self._failure(verb, error, args[0] if args else "")
            raise failure  # outside of the try block, which would attach the library's error as the context

        return call

    return wrapped


class RemoteFolder(Folder):
    """A folder behind fsspec (``s3://``, ``gs://``, ``memory://``, ...).

    The library below fsspec tries failed requests again. Its exceptions may contain the URL with its secrets, so every
    failure becomes a :class:`~ort_zero.errors.CheckpointError` with masked text, without the exception as its cause.

    An object appears when its upload ends, so it is never incomplete. But stores have no rename: the partial name is a
    separate object, which :meth:`publish` moves, on the server if the store can copy.
    """

    block = 4 * RANGE_BYTES
    parallel_reads = 8

    def __init__(self, url: str):
        super().__init__(url)
        import fsspec

        self._gave_up = False
        failure = None
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except Exception as error:
            failure = self._failure("open", error)
        if failure is not None:
            raise failure

    def _failure(self, verb: str, error: Exception, name: str = "") -> CheckpointError:
        """Return the error for the user, without the secrets of the URL in any form."""
        first = str(error).strip().partition("\n")[0]
        text = first if first and isinstance(error, OSError) else f"{type(error).__name__}: {first}".removesuffix(": ")
        is_final = isinstance(error, (FileNotFoundError, ImportError, ValueError))
        advice = "" if is_final else " (do it again when the store answers, with credentials that it accepts)"
        return CheckpointError(f"cannot {verb} {self.path(name)}: {masked_as_in(text, self.url)}{advice}")

    def _at(self, name: str) -> str:
        return joined_url(self._root.rstrip("/"), name) if name else self._root

    @_masking("list")
    def names(self) -> list[str]:
        """List the objects under the URL, without fsspec's cache of an earlier listing."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in paths if path.rstrip("/") != self._root})

    @_masking("list")
    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root.rstrip("/")})

    @_masking("look at")
    def modified(self, name: str) -> float | None:
        try:
            return self._fs.modified(self._at(name)).timestamp()
        except (OSError, NotImplementedError, AttributeError):
            return None

    @_masking("look at")
    def size(self, name: str) -> int | None:
        try:
            return self._fs.size(self._at(name))
        except FileNotFoundError:
            return None

    @_masking("read")
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path, end = self._at(name), offset + len(buffer)
        starts = list(range(offset, end, RANGE_BYTES))
        ends = [min(start + RANGE_BYTES, end) for start in starts]
        answers = self._fs.cat_ranges([path] * len(starts), starts, ends)
        for start, last, data in zip(starts, ends, answers, strict=True):
            if isinstance(data, FileNotFoundError):
                raise CorruptCheckpointError(f"{self.path(name)} is missing")
            if isinstance(data, Exception):
                raise data
            if len(data) > last - start:
                raise CheckpointError(
                    f"cannot read {self.path(name)}: its server sends {len(data)} bytes where {last - start} were "
                    "asked, so it ignores ranged requests; copy the checkpoint to a local folder first"
                )
            if len(data) != last - start:
                raise CorruptCheckpointError(
                    f"{self.path(name)} is truncated: it ends at byte {start + len(data)}, "
                    f"bytes up to {last} are needed"
                )
            buffer[start - offset : last - offset] = data
        self._count(len(buffer))

    @_masking("make")
    def make(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        path = self._at(self.partial(name, token))
        failure = stream = None
        try:
            part = max(CHUNK, -(-size // _MAX_PARTS)) if size else _PART_OF_UNKNOWN
            stream = self._fs.open(path, "wb", block_size=part)
            yield stream
            stream.close()
        except BaseException as error:
            if stream is not None:
                self._abandon(stream, path)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            failure = self._failure("write", error, name)
        if failure is not None:
            raise failure

    def _abandon(self, stream: Any, path: str) -> None:
        """End an upload so that no object appears; errors are ignored, since the first error says more."""
        if hasattr(stream, "discard"):
            with suppress(Exception):
                stream.discard()
        # closing would upload the bytes so far, so mark the stream as closed; a file in memory refuses the mark
        with suppress(AttributeError):
            stream.closed = True
        self._forget(path)

    def _forget(self, path: str) -> None:
        """Remove a hidden object; if the removal fails, the next run removes it.

        After one failure later calls do nothing: waiting for each would take long.
        """
        limit = {"timeout": _SECONDS_TO_REMOVE} if self._fs.async_impl else {}
        if self._gave_up:
            return
        self._fs.invalidate_cache(path)
        try:
            self._fs.rm_file(path, **limit)
        except FileNotFoundError:
            return
        except Exception:
            self._gave_up = True

    @_masking("rename")
    def publish(self, name: str, token: str) -> None:
        """Move the object to its final name, on the server if the store can copy."""
        self._fs.mv(self._at(self.partial(name, token)), self._at(name))

    @_masking("remove")
    def discard(self, name: str, token: str) -> None:
        self._forget(self._at(self.partial(name, token)))

    @_masking("remove")
    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove_if_possible(self, name: str) -> None:
        """Remove an object, with one try of at most :data:`_SECONDS_TO_REMOVE` seconds."""
        self._forget(self._at(name))


def refuse_within(target: Folder, root: str) -> None:
    """Raise CheckpointError if the destination `target` is the checkpoint `root` (folder or URL), or lies in it."""
    inner, outer = target.url, root
    if "://" not in inner and "://" not in outer:
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    if f"{inner}/".startswith(f"{outer}/"):
        raise CheckpointError(f"the destination {target.path()} lies in the checkpoint {root}; choose another")


def open_folder(url: str | os.PathLike) -> Folder:
    """Return the folder of a local path or an fsspec URL; the folder need not exist."""
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if not text.strip():
        raise CheckpointError("no folder was given: the path is empty")
    if "://" not in text:
        return LocalFolder(text)
    return RemoteFolder(text)
