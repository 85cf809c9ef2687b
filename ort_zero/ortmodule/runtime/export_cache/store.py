"""Stores exported graphs and optimized models in a folder, for other processes and later runs.

An entry is one zip file: ``entry.json`` tells from what the graph was made, and the digests of the other members.
Whatever is in the folder is data to be checked: an entry counts if every criterion is equal and every digest is right.
Nothing is unpickled, imported or run. Digests find damage, not
malice: who may write to the folder must be trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.errors import ConfigError
from ort_zero.log import get_logger
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, difference, digest_of
from ort_zero.utils import atomic_write
from ort_zero.utils.trusted_folder import reason_not_to_trust

FORMAT = "ort_zero.export"
VERSION = 3
KEY = "ort_zero.ortmodule.cache_dir"
AUTO = "auto"
"""Stands for the folder of :func:`ort_zero.env.export_cache_dir`."""
LIMIT = 2 << 30
"""Maximum number of bytes that the files of one folder take together."""
OWN_LIMIT = 512 << 20
"""The same, of the folder that nobody has asked for."""

_HEADER = "entry.json"
_LONGEST_HEADER = 256 << 20
_LOOKED_AT = 50
"""Maximum number of entries whose headers are read to say why there is no hit."""
_FORGOTTEN = 3600
"""Age in seconds from which a temporary file belongs to a process that was killed."""
_OURS = re.compile(r"[\w.-]+\.[0-9a-f]{32}\.(?:graph|session)")
_TEMPORARY = re.compile(r"\.ort_zero-.+\.tmp")
_BLOB = b"ort_zero.session 1 "


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The result of a successful lookup: an entry that is as good as a new export."""

    path: Path
    meta: dict[str, Any]
    blobs: dict[str, bytes]
    compared: str
    """The criteria that were compared, for messages: ``"the same model, packages, options, inputs, model code"``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Missed:
    """The result of a lookup that found no entry, with the reason."""

    why: str
    """The reason of the miss, such as ``"packages differ: torch 2.12.0 -> 2.13.0"``."""


class _Unusable(Exception):
    """An entry that is ignored; says why."""


def opened(folder: str | None) -> ExportCache | None:
    """Return the cache that a section asks for; None for none.

    The user's own folder is left alone, with a line that says why, where others may write into it.

    Args:
        folder: ``"auto"`` for the user's own, where there is one.

    Raises:
        ConfigError: a folder that was named cannot be used.
    """
    if folder is None:
        return None
    if folder != AUTO:
        return ExportCache(folder)
    own = env.export_cache_dir()
    if own is None:
        return None
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)  # constants of the model and of the arguments are nobody else's business
        return ExportCache(own, limit=OWN_LIMIT)
    except (ConfigError, OSError) as error:
        _say_once(f"no graphs are kept for later runs: {error}")
        return None


@functools.cache
def _say_once(words: str) -> None:
    get_logger().info("%s", words)


class ExportCache:
    """Finds and stores entries in one folder. Safe for several processes at once.

    Args:
        folder: a local path; ``~`` is the user's home. Made if it is missing.
        limit: bytes that all entries may take; those that were not used for the longest time go first.

    Raises:
        ConfigError: the folder cannot be made or written to, or others may write to it.
    """

    def __init__(self, folder: str | os.PathLike, *, limit: int = LIMIT):
        if "://" in os.fspath(folder):
            raise ConfigError(f'"{KEY}" is {os.fspath(folder)!r}, but the export cache is a local folder; give a path')
        self.limit = limit
        self._warned = False
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except (OSError, RuntimeError, ValueError) as error:  # no home folder; a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f'"{KEY}" is {os.fspath(folder)!r}, where no entries can be kept ({reason}); name a folder that this '
                "user may write to, or leave the key out to export anew in every run"
            ) from None
        untrusted = reason_not_to_trust(self.folder)
        if untrusted is not None:
            raise ConfigError(
                f'"{KEY}" is {os.fspath(folder)!r}, where others could plant graphs: {untrusted}; name a folder that '
                "only this user may write to, or leave the key out to export anew in every run"
            )

    # -- graphs --------------------------------------------------------------------------------------------------------

    def find(self, criteria: Mapping[str, Criterion], mode: str) -> Found | Missed:
        """Return the graph that was made under the very same criteria, or why there is none. Never raises.

        Args:
            criteria: by name; ``"model"`` names the class in its `about`.
            mode: ``"training"`` or ``"inference"``.
        """
        path = self._path(criteria, mode)
        try:
            found = self._read(path, criteria, mode)
        except FileNotFoundError:
            return Missed(self._nearest(criteria, mode))
        except _Unusable as unusable:
            return Missed(str(unusable))
        except Exception as error:  # whatever damaged bytes make of zipfile and json
            return Missed(_damaged(path, str(error) or type(error).__name__))
        _touch(path)
        return found

    def store(
        self, criteria: Mapping[str, Criterion], mode: str, meta: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> Path | None:
        """Write an entry, unless there is a valid one; return its path. Never raises for what the disk does.

        Args:
            criteria: as for :meth:`find`.
            mode: as for :meth:`find`.
            meta: what ``json.dumps`` takes; comes back with :meth:`find`.
            blobs: bytes by name.

        Returns:
            None if nothing could be written; a warning has said why, once.
        """
        path = self._path(criteria, mode)
        if isinstance(self.find(criteria, mode), Found):
            return path
        header = {
            "format": FORMAT,
            "version": VERSION,
            "key": path.name,
            "mode": mode,
            "criteria": {name: {"about": c.about, "parts": dict(c.parts)} for name, c in criteria.items()},
            "meta": dict(meta),
            "blobs": {name: [len(data), digest_of(data)] for name, data in blobs.items()},
        }
        return self._write(path, _packed(header, blobs))

    def _path(self, criteria: Mapping[str, Criterion], mode: str) -> Path:
        key = json.dumps([mode, sorted((name, c.digest) for name, c in criteria.items())])
        return self.folder / f"{_prefix(criteria, mode)}.{digest_of(key.encode())}.graph"

    def _read(self, path: Path, criteria: Mapping[str, Criterion], mode: str) -> Found:
        with _opened(path) as archive:
            header = _header(archive, path)
            differing = _differences(header, criteria)
            if header["key"] != path.name or header["mode"] != mode or differing:
                raise _Unusable(f"entry {path.name} belongs to something else, ignored")
            blobs = {}
            for i, (name, (size, digest)) in enumerate(header["blobs"].items()):
                about = archive.getinfo(f"blob/{i}")
                if about.file_size != size or about.compress_type != zipfile.ZIP_STORED:
                    raise _Unusable(_damaged(path, "size"))
                blobs[name] = archive.read(about)
                if digest_of(blobs[name]) != digest:
                    raise _Unusable(_damaged(path, "content digest"))
        return Found(path, header["meta"], blobs, f"the same {', '.join(criteria)}")

    def _nearest(self, criteria: Mapping[str, Criterion], mode: str) -> str:
        """Return in which criteria the entry differs that differs in the fewest; the newest of them."""
        about = criteria["model"].about if "model" in criteria else ""
        nearest: dict[str, str] | None = None
        ignored = ""
        for path in self._newest(f"{_prefix(criteria, mode)}."):
            try:
                with _opened(path) as archive:
                    header = _header(archive, path)
                differing = _differences(header, criteria)
            except FileNotFoundError:
                continue
            except _Unusable as unusable:
                ignored = ignored or f"; {unusable}"
                continue
            except Exception as error:  # as in find
                ignored = ignored or f"; {_damaged(path, str(error))}"
                continue
            if differing and (nearest is None or len(differing) < len(nearest)):
                nearest = differing
        if nearest is None:
            return f"no {mode} entry for {about or 'this model'} yet{ignored}"
        return "; ".join(f"{name} {_verb(name)}: {words}" for name, words in nearest.items())

    def _newest(self, prefix: str) -> list[Path]:
        """Return the entries to compare with, newest first."""
        known = [(used, path) for used, _, path in self._entries() if path.name.startswith(prefix)]
        return [path for _, path in sorted(known, reverse=True)[:_LOOKED_AT]]

    # -- optimized models ----------------------------------------------------------------------------------------------

    def find_blob(self, digest: str) -> bytes | None:
        """Return the bytes that were stored under `digest`; None if there are none, or they are damaged. Never raises.

        Args:
            digest: 32 hexadecimal digits: of all that the bytes were made from.
        """
        path = self._blob_path(digest)
        try:
            with open(path, "rb") as file:
                first = file.readline(len(_BLOB) + 66)
                data = file.read()
        except OSError:
            return None
        if first != _blob_line(digest, data):
            get_logger().info(_damaged(path, "content digest"))
            return None
        _touch(path)
        return data

    def store_blob(self, digest: str, data: bytes) -> Path | None:
        """Write bytes under a digest of all that they were made from; return their path, or None as :meth:`store`."""
        path = self._blob_path(digest)
        if self.find_blob(digest) is not None:
            return path
        return self._write(path, [_blob_line(digest, data), data])

    def _blob_path(self, digest: str) -> Path:
        if not re.fullmatch("[0-9a-f]{32}", digest):
            raise ValueError(f"{digest!r} is no digest of 32 hexadecimal digits")
        return self.folder / f"model.{digest}.session"

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> Path | None:
        size = sum(map(len, pieces))
        if size > self.limit:
            self._warn(f"{path.name} is not kept: its {size} bytes exceed the limit of {self.limit}")
            return None
        temporary = self.folder / f".ort_zero-{uuid.uuid4().hex}.tmp"
        try:
            with atomic_write.replacing(path, temporary=temporary) as file:
                file.writelines(pieces)
                if path.is_dir() and not path.is_symlink():
                    _set_aside(path)
        except OSError as error:
            self._warn(f"{self.folder}: nothing is kept in the export cache: {error.strerror or error}")
            return None
        self._shrink(path)
        return path

    def _warn(self, words: str) -> None:
        if not self._warned:
            self._warned = True
            get_logger().warning("%s", words)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Return last use, size in bytes and path of each of our files."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        about = entry.stat()
                        found.append((about.st_mtime, about.st_size, self.folder / entry.name))
        return found

    def _shrink(self, newest: Path) -> None:
        """Remove what was not used for the longest time, and what killed processes left behind."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit:
                break
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
        with contextlib.suppress(OSError), os.scandir(self.folder) as others:
            for other in others:
                with contextlib.suppress(OSError):
                    if _TEMPORARY.fullmatch(other.name) and other.stat().st_mtime < time.time() - _FORGOTTEN:
                        os.unlink(other.path)


def _prefix(criteria: Mapping[str, Criterion], mode: str) -> str:
    about = criteria["model"].about if "model" in criteria else ""
    return re.sub(r"[^A-Za-z0-9_]", "_", f"{about or 'model'}"[:80]) + "-" + re.sub(r"[^A-Za-z0-9_]", "_", mode[:20])


def _damaged(path: Path, how: str) -> str:
    return f"entry {path.name} is damaged ({how}), ignored"


def _verb(name: str) -> str:
    if name == "model code":
        return "changed"
    return "differ" if name.endswith("s") else "differs"


def _touch(path: Path) -> None:
    """Set the time of an entry's last use to now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _set_aside(path: Path) -> None:
    """Make room where something that is no file is in the way; what it holds is not ours to delete."""
    try:
        path.rmdir()
    except OSError:
        shutil.move(path, f"{path}.aside-{time.time_ns()}")


def _packed(header: dict, blobs: Mapping[str, bytes]) -> list[memoryview]:
    """Return the content of an entry's file, in parts."""
    text = json.dumps(header).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = digest_of(text).encode()
        # names of thousands of modules and their attributes shrink to a tenth
        archive.writestr(zipfile.ZipInfo(_HEADER), text, zipfile.ZIP_DEFLATED, 1)
        for i, data in enumerate(blobs.values()):
            archive.writestr(zipfile.ZipInfo(f"blob/{i}"), data)
    return [file.getbuffer()]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        yield archive


def _header(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """Return the checked header of an entry.

    Raises:
        _Unusable: it is no entry of this version, or damaged.
    """
    about = archive.getinfo(_HEADER)
    if about.file_size > _LONGEST_HEADER:
        raise _Unusable(_damaged(path, "header"))
    text = archive.read(about)
    if digest_of(text).encode() != archive.comment:
        raise _Unusable(_damaged(path, "digest of the header"))
    header = json.loads(text)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _Unusable(f"entry {path.name} is of another format, ignored")
    if header.get("version") != VERSION:
        raise _Unusable(f"entry {path.name} has format version {header.get('version')}, not {VERSION}, ignored")
    return header


def _differences(header: dict, criteria: Mapping[str, Criterion]) -> dict[str, str]:
    """Return by name in which criteria an entry differs, and how."""
    found = {}
    stored = header["criteria"]
    for name in {**stored, **criteria}:
        if name not in stored or name not in criteria:
            found[name] = "only one of the two has it"
        elif stored[name]["parts"] != dict(criteria[name].parts):
            found[name] = difference(stored[name]["parts"], criteria[name].parts)
    return found


def _blob_line(digest: str, data: bytes) -> bytes:
    return _BLOB + f"{digest} {digest_of(data)}\n".encode()
