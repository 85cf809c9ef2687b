"""Read slices of files, and write files that get their final name when they are complete; locally or through fsspec.

A local folder is read with ``pread`` into reused buffers, not through memory maps. So a file that is too short causes
an error with its name and not a SIGBUS, and the bytes that were read can be counted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ort_zero.checkpoint.files.folders import CHUNK, Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.atomic_write import removed_on_error

__all__ = ["CHUNK", "Folder", "LocalFolder", "open_folder"]

_MAX_OPEN = 256
"""Maximum number of files of a folder that stay open between reads; many systems allow a process 1024."""
_SPECIAL = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


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
        """List the folder with ``os.listdir``; return an empty list if there is no such folder."""
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
        """Return the modification time in the file system."""
        try:
            return (self._root / name).stat().st_mtime
        except OSError:
            return None

    def size(self, name: str) -> int | None:
        """Return the size in bytes that the file system reports, None if there is no such file."""
        status = self._status(name)
        if status is None:
            return None
        self._refuse_special(name, status)
        return status.st_size

    def exists(self, name: str) -> bool:
        """Return True if the file system has a regular file of this name."""
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
        """Make the folder and its parents on the file system; the folder may exist."""
        self._root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self, name: str, token: str, durable: bool = False, size: int = 0) -> Iterator[IO[bytes]]:
        """Yield an unbuffered stream into a hidden file in this folder; an exception removes the file."""
        path = self._root / self.partial(name, token)
        try:
            with removed_on_error(path, durable=durable, buffering=0) as raw:
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    takes_ranges = True

    @contextmanager
    def writing_from(self, name: str, token: str, offset: int) -> Iterator[IO[bytes]]:
        """Yield an unbuffered stream into the hidden file, which is made if it does not exist."""
        try:
            descriptor = os.open(self._root / self.partial(name, token), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb", buffering=0) as raw:
                raw.seek(offset)
                yield cast(IO[bytes], _WholeWrites(raw))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(name)}: {error.strerror or error}") from error

    def publish(self, name: str, token: str) -> None:
        """Rename the hidden file, which replaces a file of the final name in one step."""
        os.replace(self._root / self.partial(name, token), self._root / name)

    def settle(self) -> None:
        """Call fsync on the folder, so that renames survive a power failure."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self, name: str, token: str) -> None:
        """Remove the hidden file of :meth:`writing`, if it exists."""
        (self._root / self.partial(name, token)).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file from the file system; a missing file is no error."""
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
    from ort_zero.checkpoint.files.remote_storage import RemoteFolder

    return RemoteFolder(text)
