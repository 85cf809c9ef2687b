"""Read and write folders behind fsspec: object stores, web servers, memory; ``storage.open_folder`` opens one.

The library below fsspec tries failed requests again. Its exceptions may contain the URL with its secrets, so none of
them leaves this module: every failure becomes a :class:`~ort_zero.errors.CheckpointError` with masked text and without
the exception as its cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

from ort_zero.checkpoint.files.folders import CHUNK, Folder, joined_url
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.masking import masked_as_in

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
        """List the common prefixes (folders) of the objects under the URL."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root.rstrip("/")})

    @_masking("look at")
    def modified(self, name: str) -> float | None:
        """Return the modification time that the store reports, None if this kind of store reports none."""
        try:
            return self._fs.modified(self._at(name)).timestamp()
        except (OSError, NotImplementedError, AttributeError):
            return None

    @_masking("look at")
    def size(self, name: str) -> int | None:
        """Return the size in bytes that the store reports, None if there is no such object."""
        try:
            return self._fs.size(self._at(name))
        except FileNotFoundError:
            return None

    @_masking("read")
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by ranged requests, several at a time if it is large."""
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
        """Make the folder if the store has folders; the folder may exist."""
        self._fs.makedirs(self._root, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Yield a stream into a separate object, which appears when the block ends and not if the block raises."""
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
        """Remove the partial object of :meth:`writing`, if it exists."""
        self._forget(self._at(self.partial(name, token)))

    @_masking("remove")
    def remove(self, name: str) -> None:
        """Remove an object; a missing object is no error."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove_if_possible(self, name: str) -> None:
        """Remove an object, with one try of at most :data:`_SECONDS_TO_REMOVE` seconds."""
        self._forget(self._at(name))
