"""Open a ``.pt`` file of ``torch.save`` (an uncompressed zip) without reading the data of its tensors.

The headers of the records are compared with the zip's directory; the records have a CRC-32.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from isal.isal_zlib import crc32

from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Checksum, File
from ort_zero.checkpoint.restricted_pickle.rebuild import read_pickle
from ort_zero.checkpoint.restricted_pickle.values import HostilePickleError, MalformedPickleError, StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_LOCAL = struct.Struct("<4s5H3I2H")
"""Fixed part of a zip's local file header; the record's name and extra fields follow."""
_END = struct.Struct("<4s4H2IH")
"""The last record of a zip without a comment, which torch never writes."""
_NUMBERS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "float16": "<e"}
_MAX_EXTRA = 256
"""Maximum number of bytes between two records: the descriptor of the first."""
_STREAM_BUFFER = 1 << 18  # bytes
_PICKLE = "data.pkl"
_DATA = "data/"
_MAX_SMALL = 1 << 20
"""Maximum size in bytes of a file that is read at once for its headers, and of a tensor that is larger than its file: a
small expanded mask."""


class _Record(NamedTuple):
    name: str
    offset: int
    length: int
    crc: int | None
    """None in a file that was written without checksums."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """One opened ``.pt`` file without the data of its tensors; compared by identity."""

    file: File
    content: Any
    """The saved value, with :class:`~ort_zero.checkpoint.restricted_pickle.values.StoredTensor` for tensors, and
    :class:`~ort_zero.checkpoint.restricted_pickle.values.OpaqueObject` for objects of unknown classes."""
    saved_as: str
    """File name without ``.pt`` at the time of writing; "archive" if the file was written to a stream."""
    opaque: frozenset[str] = frozenset()
    """Names of the unknown classes, whose objects are only records in `content`."""
    start: int = 0
    """Byte of the file at which the zip begins, from which the offsets in `content` count."""


Contents = dict[tuple, tuple[Any, frozenset[str]]]
"""Contents of pickles by the pickle's bytes, the size of the file and the places of the storages. Many files of a save
have the same pickle."""


def open_torch_file(
    folder: Folder, name: str, cache: Contents | None = None, start: int = 0, length: int | None = None
) -> TorchFile:
    """Return the content of a ``.pt`` file, or of the range of a file that holds one.

    Files with the same pickle share one content in `cache`, which the caller must not change.
    """
    data = _Bytes(folder, name, start, length)
    records, path = _records_of(data), data.path
    prefix = next((r.name[: -len(_PICKLE) - 1] for r in records if r.name.endswith(f"/{_PICKLE}")), None)
    if prefix is None:
        raise CorruptCheckpointError(f"{path} is a zip, but not one of torch.save: it holds no {_PICKLE}")
    other = next((r.name for r in records if not r.name.startswith(f"{prefix}/")), None)
    if other is not None:
        raise CorruptCheckpointError(f"{path} is damaged: its record {other} does not lie in its folder {prefix}")
    by_name = {record.name.removeprefix(f"{prefix}/"): record for record in records}
    for key, record in by_name.items():
        if not key.startswith(_DATA) and record.crc not in (None, data.crc32(record)):
            raise CorruptCheckpointError(f"{path} is damaged: the CRC-32 of its record {record.name} is wrong")
    order = by_name.get("byteorder")
    if order is not None and data.read(order.offset, order.length).decode(errors="replace") != sys.byteorder:
        raise CheckpointError(f"{path} was written on a machine of another byte order; convert it there")
    content, opaque = _content(data, by_name, {} if cache is None else cache)
    file = File(name=name, size=start + data.size, records=_checked(records, start))
    return TorchFile(file, content, prefix, opaque, start)


def checked_bytes(folder: Folder, opened: TorchFile, stored: StoredTensor, length: int) -> bytes:
    """Return the first `length` bytes of a stored tensor, having compared its storage with the CRC-32."""
    name = opened.file.name
    for offset, size, crc in opened.file.records:
        if offset == opened.start + stored.storage_offset and folder.crc32(name, offset, offset + size) != crc:
            raise CorruptCheckpointError(
                f"{folder.path(name)} is damaged: wrong CRC-32 of a tensor of shape {list(stored.shape)}"
            )
    return folder.read(name, opened.start + stored.offset, length)


def read_number(folder: Folder, opened: TorchFile, stored: StoredTensor) -> float | None:
    """Return the value of a tensor without dimensions, such as a step counter; None for a dtype that counts nothing."""
    raw, dtype = checked_bytes(folder, opened, stored, stored.itemsize), stored.dtype
    if dtype == "bfloat16":
        raw, dtype = b"\0\0" + raw, "float32"
    return struct.unpack(_NUMBERS[dtype], raw)[0] if dtype in _NUMBERS else None


def read_records(folder: Folder, name: str, start: int = 0, length: int | None = None) -> tuple[Checksum, ...]:
    """Return (offset in the file, length, CRC-32) of each record, having compared headers with the zip's directory."""
    return _checked(_records_of(_Bytes(folder, name, start, length)), start)


class _Bytes:
    """The bytes of a ``.pt`` file, or of the range of a file that holds one; a small one is read at once."""

    def __init__(self, folder: Folder, name: str, start: int, length: int | None):
        self.folder, self.name, self.start, self.path = folder, name, start, folder.path(name)
        size = folder.size(name)
        if size is None:
            raise CorruptCheckpointError(f"{self.path} is missing")
        if length is not None:
            self.path += f" (bytes {start} to {start + length})"
            if size < start + length:
                raise CorruptCheckpointError(f"{self.path} is truncated: the file has {size} bytes")
        self.size = size if length is None else length
        if not self.size:
            raise CorruptCheckpointError(f"{self.path} is empty")
        self._whole = folder.read(name, start, self.size) if self.size <= _MAX_SMALL else None

    def read(self, offset: int, length: int) -> bytes:
        if self._whole is not None:
            return self._whole[offset : offset + length]
        return self.folder.read(self.name, self.start + offset, length)

    def crc32(self, record: _Record) -> int:
        if self._whole is not None:
            return crc32(self.read(record.offset, record.length))
        begin = self.start + record.offset
        return self.folder.crc32(self.name, begin, begin + record.length)

    def open(self) -> IO[bytes]:
        if self._whole is not None:
            return io.BytesIO(self._whole)
        return io.BufferedReader(_Stream(self), _STREAM_BUFFER)


class _Stream(io.RawIOBase):
    """The bytes of a file as a stream, for the reader of zips."""

    def __init__(self, data: _Bytes):
        super().__init__()
        self._data, self._position = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.size}[whence]
        if base + offset < 0:
            raise OSError(22, "the position is before the start of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._data.size - self._position))
        buffer[:length] = self._data.read(self._position, length)
        self._position += length
        return length


def _checked(records: list[_Record], start: int) -> tuple[Checksum, ...]:
    return tuple((start + r.offset, r.length, r.crc) for r in records if r.crc is not None)


def _records_of(data: _Bytes) -> list[_Record]:
    """Return the records of a zip in their order; in a file without checksums the CRC of every record is None."""
    path, size = data.path, data.size
    try:
        with data.open() as stream, zipfile.ZipFile(stream) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            end = archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise _not_a_zip(path, data.read(0, min(size, 4)), error) from None
    if not data.read(max(0, size - _END.size), min(size, _END.size)).startswith(b"PK\x05\x06"):
        raise CorruptCheckpointError(f"{path} is too long or damaged: it does not end with its zip directory")
    repeated = [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]
    if repeated:
        raise CorruptCheckpointError(f"{path} is damaged: two of its records are named {repeated[0]}")
    records, position = [], 0
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(f"{path} holds compressed data ({entry.filename}); save it again with torch.save")
        begin, record_name = entry.header_offset, entry.filename.encode()
        length = max(0, min(_LOCAL.size + len(record_name), size - begin))
        raw = data.read(begin, length)
        signature, *_, name_length, extra_length = _LOCAL.unpack(raw[: _LOCAL.size].ljust(_LOCAL.size, b"\0"))
        fits = signature == b"PK\x03\x04" and raw[_LOCAL.size :] == record_name and name_length == len(record_name)
        offset = begin + length + extra_length
        if not fits or not 0 <= begin - position <= _MAX_EXTRA or offset + entry.file_size > end:
            raise CorruptCheckpointError(f"{path} is damaged: the header of its record {entry.filename} does not fit")
        position = offset + entry.file_size
        records.append(_Record(entry.filename, offset, entry.file_size, entry.CRC))
    # torch.serialization.set_crc32_options(False) leaves zeros; the CRC-32 of a record without bytes is zero as well
    has_checksums = any(record.crc for record in records)
    return records if has_checksums else [record._replace(crc=None) for record in records]


def _not_a_zip(path: str, start: bytes, error: Exception) -> CheckpointError:
    if start == b"PK\x03\x04":
        return CorruptCheckpointError(f"{path} is truncated or its end is damaged: it has no readable zip directory")
    if start[:1] == b"\x80":
        return CheckpointError(
            f"{path} is in the format of torch.save before torch 1.6; load it with torch.load and save it again"
        )
    return CorruptCheckpointError(f"{path} is not a file of torch.save ({error})")


def _content(data: _Bytes, records: Mapping[str, _Record], cache: Contents) -> tuple[Any, frozenset[str]]:
    storages = {key.removeprefix(_DATA): (r.offset, r.length) for key, r in records.items() if key.startswith(_DATA)}
    pickled = data.read(records[_PICKLE].offset, records[_PICKLE].length)
    key = (pickled, data.size, *storages.items())
    if key not in cache:
        check = functools.partial(_check_place, data.path, dict(storages.values()), data.size)
        cache[key] = read_pickle_of(data.path, pickled, storages, check)
    return cache[key]


def read_pickle_of(
    path: str,
    data: bytes,
    storages: Mapping[str, tuple[int, int]],
    check: Callable[[StoredTensor], Any],
    malformed: type[CheckpointError] = CheckpointError,
) -> tuple[Any, frozenset[str]]:
    """Return the result of :func:`read_pickle`; errors name the file `path`."""
    try:
        return read_pickle(data, storages, check)
    except HostilePickleError as error:
        raise CheckpointError(
            f"{path} calls {error}, which no checkpoint needs and which runs code where torch.load executes the file; "
            "nothing was called: do not use the file unless you know who wrote it"
        ) from None
    except MalformedPickleError as error:
        raise malformed(f"{path} cannot be unpickled: {error}") from None


def _check_place(path: str, lengths: Mapping[int, int], size: int, value: StoredTensor) -> StoredTensor:
    """Return `value`, which lies in a record of the file and is not larger than the file.

    A tensor may repeat its elements (stride 0), so a few bytes can describe a tensor of any size. An output file would
    contain every repetition, so the size of the file limits the size of the tensor.
    """
    if 0 in value.shape:
        return value
    end = value.offset - value.storage_offset + value.span * value.itemsize
    if min(value.strides, default=0) < 0 or end > lengths.get(value.storage_offset, -1):
        raise CorruptCheckpointError(f"{path} is damaged: a tensor of shape {list(value.shape)} has no record")
    whole = math.prod(value.shape) * value.itemsize
    if whole > max(size, _MAX_SMALL):
        raise CorruptCheckpointError(
            f"{path}: a tensor of shape {list(value.shape)} repeats its elements to {whole} bytes, more than the "
            f"file has ({size})"
        )
    return value
