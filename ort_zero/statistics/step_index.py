"""Finds where the full steps of a rank's file lie, also in a file that ends in the middle of one."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics import extra
from ort_zero.statistics.file_format import END, SCHEMA, STAMP_PATTERN, checksum_fits

with extra.required():
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class StepLocation:
    """Where a step lies in a file."""

    number: int
    """Number of the step."""
    offset: int
    """First byte of the step in the file."""
    length: int
    """Bytes that the step takes."""


def locate_steps(file: Any, path: Path) -> tuple[list[StepLocation], bool, int]:
    """Return where the full steps lie, whether the file was ended properly, and how many bytes are left over."""
    size = os.fstat(file.fileno()).st_size
    offset, whole = _read_header(file, path, size)
    found: list[StepLocation] = []
    while whole and offset < size:
        file.seek(offset)
        prefix = file.read(8)
        if prefix == END:
            return found, True, 0
        length, stamp = _read_stamp(file, prefix, size - offset)
        if not length:
            # what follows a full step is at most one broken step: the writer stops at the first
            break
        if stamp is None or (found and stamp <= found[-1].number):
            raise StatisticsError(f"{path} is damaged at byte {offset}, after {len(found)} steps")
        found.append(StepLocation(stamp, offset, length))
        offset += length
    rest = size - offset
    if not rest and found and not _is_good(file, found[-1]):
        # a machine that went down may leave zeros where the last step was to come
        return found[:-1], False, found[-1].length
    return found, False, rest


def _read_header(file: Any, path: Path, size: int) -> tuple[int, bool]:
    """Return where the header ends, and whether all of it is there."""
    head = file.read(8)
    if len(head) == 8:
        mark, length = struct.unpack("<Ii", head)
        if mark != 0xFFFFFFFF or not 0 < length < 1 << 24:
            raise StatisticsError(f"{path} is damaged: it does not begin as an Arrow stream")
        if 8 + length <= size:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(head + file.read(length)))
            except (pa.ArrowException, OSError) as error:
                raise StatisticsError(f"{path} has a damaged header: {error}") from error
            if not schema.equals(SCHEMA, check_metadata=True):
                raise StatisticsError(f"{path} has a header that is not of ort_zero's statistics")
            return 8 + length, True
    return 0, False


def _read_stamp(file: Any, prefix: bytes, left: int) -> tuple[int, int | None]:
    """Return the length of the step that begins with `prefix` (0: it is not all there), and its number."""
    if len(prefix) < 8:
        return 0, None
    mark, metadata_length = struct.unpack("<Ii", prefix)
    if mark != 0xFFFFFFFF or metadata_length <= 0:
        # zeros to the end of the file are what a crash of the machine leaves, anything else was changed
        return (0, None) if not prefix.strip(b"\0") and _only_zeros(file) else (left, None)
    if 8 + metadata_length > left:
        return 0, None
    metadata = file.read(metadata_length)
    length = 8 + metadata_length + _body_length(metadata)
    if length < 8 + metadata_length:
        return left, None
    if length > left:
        return 0, None
    stamp = STAMP_PATTERN.search(metadata)
    return length, int(stamp[1]) if stamp else None


def _only_zeros(file: Any) -> bool:
    return not any(chunk.strip(b"\0") for chunk in iter(lambda: file.read(1 << 20), b""))


def _body_length(metadata: bytes) -> int:
    """Return the field ``bodyLength`` of Arrow's flatbuffer ``Message``, -1 if it cannot be."""
    try:
        (root,) = struct.unpack_from("<I", metadata)
        (vtable,) = struct.unpack_from("<i", metadata, root)
        (field,) = struct.unpack_from("<H", metadata, root - vtable + 4 + 2 * 3)
        return struct.unpack_from("<q", metadata, root + field)[0] if field else 0
    except struct.error:
        return -1


def _is_good(file: Any, step: StepLocation) -> bool:
    file.seek(step.offset)
    return checksum_fits(file.read(step.length))
