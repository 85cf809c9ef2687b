"""Read and write folders behind fsspec: object stores, web servers, memory; ``storage.open_folder`` opens one.

An exception of a library below fsspec may contain the URL with its secrets, so it never leaves this module. Every
failure becomes a :class:`~ort_zero.errors.CheckpointError` with masked text and without the exception as its cause.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar, cast

from ort_zero.checkpoint.files.folders import CHUNK, Folder, joined_url
from ort_zero.checkpoint.files.remote_faults import Attempts, is_passing, way_out
from ort_zero.checkpoint.files.s3_uploads import S3Upload
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.masking import masked_as_in
from ort_zero.utils.atomic_write import partial_name

_BUFFER = 1 << 18
"""Number of bytes that a stream of :meth:`RemoteFolder.open` reads at a time."""
_MAX_REQUESTS = 8
"""Number of ranged requests of one call that are sent at a time."""
_SECONDS_TO_REMOVE = 10
"""Maximum seconds to remove one object: an object that stays is hidden, and the next run removes it."""
_renewal_lock = threading.Lock()
_Result = TypeVar("_Result")


def _masking(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wrap a method of a folder: retry errors that may pass, and turn others into CheckpointError without secrets."""

    @functools.wraps(method)
    def call(self: RemoteFolder, *args: Any, **options: Any) -> _Result:
        try:
            return self._tried(lambda: method(self, *args, **options))
        except CheckpointError:
            raise
        except _UnreadableFile as error:
            failure = self._failure(method.__name__, error.error, error.name)
        except Exception as error:  # libraries below fsspec raise any class
            failure = self._failure(method.__name__, error, args[0] if args else "")
        raise failure  # outside of the try block, which would attach the library's error as the context

    return call


class _UnreadableFile(Exception):
    """One of several files cannot be read."""

    def __init__(self, name: str, error: Exception):
        super().__init__(name)
        self.name, self.error = name, error
        self.__cause__ = error


class RemoteFolder(Folder):
    """A folder behind fsspec (``s3://``, ``gs://``, ``memory://``, ...).

    An object appears when its upload ends, so it is never incomplete. But stores have no rename: the partial name is a
    separate object, which :meth:`publish` moves, on the server if the store can copy.
    """

    block = _MAX_REQUESTS * CHUNK // 2

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

    def _failure(self, action: str, error: Exception, name: str = "") -> CheckpointError:
        """Return the error for the user, without the secrets of the URL in any form."""
        first = str(error).strip().partition("\n")[0]
        text = first if first and isinstance(error, OSError) else f"{type(error).__name__}: {first}".removesuffix(": ")
        advice = way_out(error)
        cause = masked_as_in(text, self.url) + (f" ({advice})" if advice else "")
        return CheckpointError(f"cannot {_ACTIONS[action]} {self.path(name)}: {cause}")

    def _tried(self, operation: Callable[[], _Result]) -> _Result:
        """Call `operation` until it succeeds or a retry cannot help; return its result."""
        attempts: Attempts | None = None
        while True:
            generation = _generations.get(id(self._fs), 0)
            if attempts is None:
                attempts = Attempts(lambda: self._renew_credentials(generation), id(self._fs) in _answered)
            try:
                result = operation()
            except CheckpointError:
                raise
            except Exception as error:
                if not attempts.again(error):
                    raise
            else:
                _answered.add(id(self._fs))
                return result

    def _renew_credentials(self, generation: int) -> bool:
        """Let S3's client read the credentials again, which may have been renewed in a file; False for other stores.

        Args:
            generation: number of renewals before the failed operation: another thread may have renewed since.
        """
        if not hasattr(self._fs, "set_session"):
            return False
        with _renewal_lock:
            if _generations.get(id(self._fs), 0) == generation:
                self._fs.connect(refresh=True)
                _generations[id(self._fs)] = generation + 1
        return True

    def _at(self, name: str) -> str:
        return joined_url(self._root.rstrip("/"), name) if name else self._root

    @_masking
    def names(self) -> list[str]:
        """List the objects under the URL, without fsspec's cache of an earlier listing."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in paths if path.rstrip("/") != self._root})

    @_masking
    def folders(self) -> list[str]:
        """List the common prefixes (folders) of the objects under the URL."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root.rstrip("/")})

    @_masking
    def modified(self, name: str) -> float | None:
        """Return the modification time that the store reports, None if this kind of store reports none."""
        try:
            return self._fs.modified(self._at(name)).timestamp()
        except (OSError, NotImplementedError, AttributeError):
            return None

    @_masking
    def size(self, name: str) -> int | None:
        """Return the size in bytes that the store reports, None if there is no such object."""
        try:
            return self._fs.size(self._at(name))
        except FileNotFoundError:
            return None

    @_masking
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by ranged requests, several at a time if it is large."""
        self._read([(name, offset, [buffer])])

    def read_scattered(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers that lie one after the other in a file."""
        self.read_many([(name, offset, buffers)])

    @_masking
    def read_many(self, reads: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        """Fill buffers by ranged requests, several at a time."""
        self._read(reads)

    def _read(self, reads: Sequence[tuple[str, int, Sequence[memoryview]]]) -> None:
        requests = list(_ranges(reads))
        answers = self._answers([(self._at(name), start, end) for name, start, end, _ in requests])
        for (name, start, end, views), data in zip(requests, answers, strict=True):
            if isinstance(data, FileNotFoundError):
                raise CorruptCheckpointError(f"{self.path(name)} is missing")
            if isinstance(data, Exception):
                raise _UnreadableFile(name, data)
            if len(data) > end - start:
                raise CheckpointError(
                    f"cannot read {self.path(name)}: its server sends {len(data)} bytes where {end - start} were "
                    "asked, so it ignores ranged requests; copy the checkpoint to a local folder first"
                )
            if len(data) != end - start:
                raise CorruptCheckpointError(
                    f"{self.path(name)} is truncated: it ends at byte {start + len(data)}, bytes up to {end} are needed"
                )
            content = memoryview(data)
            for view in views:
                view[:] = content[: len(view)]
                content = content[len(view) :]
        self._count(sum(end - start for _, start, end, _ in requests))

    def _answers(self, ranges: list[tuple[str, int, int]]) -> list[Any]:
        """Return for each (path, first byte, byte behind the last) its bytes, or the exception of its request."""
        if self._is_asynchronous():
            paths, starts, ends = ([one[part] for one in ranges] for part in range(3))
            return self._fs.cat_ranges(paths, starts, ends, batch_size=_MAX_REQUESTS)
        answers: list[Any] = []
        for path, start, end in ranges:
            try:
                answers.append(self._fs.cat_file(path, start=start, end=end))
            except Exception as error:
                answers.append(error)
        return answers

    def _is_asynchronous(self) -> bool:
        from fsspec.asyn import AsyncFileSystem

        return isinstance(self._fs, AsyncFileSystem)

    def open(self, name: str) -> IO[bytes]:
        """Open an object for reading, by ranged requests."""
        size = self.size(name)
        if size is None:
            raise CorruptCheckpointError(f"{self.path(name)} is missing")
        return io.BufferedReader(_Ranges(self, name, size), _BUFFER)

    @_masking
    def make(self) -> None:
        """Make the folder if the store has folders; the folder may exist."""
        self._fs.makedirs(self._root, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Yield a stream into a separate object, which appears when the block ends and not if the block raises."""
        path = self._at(partial_name(name, token))
        failure = None
        try:
            with self._upload(path, size) as stream:
                yield stream
        except CheckpointError:
            raise
        except Exception as error:
            failure = self._failure("writing", error, name)
        if failure is not None:
            raise failure

    @contextmanager
    def _upload(self, path: str, size: int) -> Iterator[IO[bytes]]:
        if hasattr(self._fs, "call_s3"):
            upload = S3Upload(self._fs, path, self._tried, size)
            try:
                yield cast(IO[bytes], upload)
                upload.finish()
            except BaseException:
                upload.abort()
                raise
            self._fs.invalidate_cache(path)
            return
        stream = self._fs.open(path, "wb", block_size=CHUNK)
        try:
            yield stream
            stream.close()
        except BaseException:
            if hasattr(stream, "discard"):
                with suppress(Exception):  # the first error says more
                    stream.discard()
            # closing would upload the bytes so far, so mark the stream as closed; a file in memory refuses the mark
            with suppress(AttributeError):
                stream.closed = True
            self._forget(path)
            raise

    def _forget(self, path: str) -> None:
        """Remove a hidden object; if the removal fails, the next run removes it.

        After one failure of a store that does not answer, later calls do nothing: waiting for each would take long.
        """
        limit = {"timeout": _SECONDS_TO_REMOVE} if self._is_asynchronous() else {}
        if self._gave_up:
            return
        self._fs.invalidate_cache(path)
        try:
            self._fs.rm_file(path, **limit)
        except Exception as error:
            self._gave_up = is_passing(error)

    @_masking
    def publish(self, name: str, token: str, to: str | None = None) -> None:
        """Move the object to its final name, on the server if the store can copy."""
        self._fs.mv(self._at(partial_name(name, token)), self._at(to or name))

    @_masking
    def duplicate(self, name: str, to: str, token: str) -> None:
        """Copy the object, on the server if the store can copy."""
        self._fs.copy(self._at(name), self._at(to))

    @_masking
    def discard(self, name: str, token: str) -> None:
        """Remove the partial object of :meth:`writing`, if it exists."""
        self._forget(self._at(partial_name(name, token)))

    @_masking
    def remove(self, name: str) -> None:
        """Remove an object; a missing object is no error."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove_if_possible(self, name: str) -> None:
        """Remove an object, with one try of at most :data:`_SECONDS_TO_REMOVE` seconds."""
        self._forget(self._at(name))

    def end_left_over_uploads(self, left_over: Callable[[str], bool], below: bool = False) -> None:
        """Abort multipart uploads of S3; without the permission to list them, the rules of the bucket decide."""
        if not hasattr(self._fs, "abort_mpu"):
            return
        bucket, _, key = self._root.partition("/")
        prefix = f"{key.rstrip('/')}/" if key else ""
        marker: dict[str, str] = {}
        with suppress(Exception):
            while True:
                page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
                for upload in page.get("Uploads", []):
                    inner, _, name = upload["Key"].removeprefix(prefix).rpartition("/")
                    if (below or not inner) and left_over(name):
                        self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                if not page.get("IsTruncated"):
                    break
                marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


_generations: dict[int, int] = {}
"""Number of renewals of the credentials by ``id`` of the file system; fsspec never frees file systems."""
_answered: set[int] = set()
"""``id`` of each file system whose store has answered."""


def _ranges(
    reads: Sequence[tuple[str, int, Sequence[memoryview]]],
) -> Iterator[tuple[str, int, int, Sequence[memoryview]]]:
    """Yield (name, first byte, byte behind the last, buffers) of each request; a large read takes several requests."""
    for name, offset, views in reads:
        length = sum(map(len, views))
        if length <= CHUNK:
            if length:
                yield name, offset, offset + length, views
            continue
        for view in views:
            for begin in range(0, len(view), CHUNK):
                part = view[begin : begin + CHUNK]
                yield name, offset + begin, offset + begin + len(part), [part]
            offset += len(view)


_ACTIONS = {
    "names": "list",
    "folders": "list",
    "modified": "look at",
    "size": "look at",
    "read_into": "read",
    "read_many": "read",
    "make": "make",
    "writing": "write",
    "publish": "rename",
    "duplicate": "copy",
    "discard": "remove",
    "remove": "remove",
    "open": "open",
}
"""Verb of each method, for messages."""


class _Ranges(io.RawIOBase):
    """A stream that reads an object by ranged requests.

    Args:
        folder: folder of the object.
        name: name of the object.
        size: size of the object in bytes.
    """

    def __init__(self, folder: RemoteFolder, name: str, size: int):
        super().__init__()
        self._folder, self._name, self._size = folder, name, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(22, "the position is before the start of the file")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._position))
        self._folder.read_into(self._name, self._position, view[:length])
        self._position += length
        return length
