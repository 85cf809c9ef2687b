"""Find the full steps in a rank's statistics file, also in a file that was cut inside a step."""

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
    """The position of one step in a statistics file."""

    number: int
    """Number of the step."""
    offset: int
    """Offset of the step in the file, in bytes."""
    length: int
    """Size of the step, in bytes."""


def locate_steps(file: Any, path: Path) -> tuple[list[StepLocation], bool, int]:
    """Return the positions of the full steps, whether the file has an end mark, and the bytes after the last step."""
    size = os.fstat(file.fileno()).st_size
    offset, whole = _read_header(file, path, size)
    steps: list[StepLocation] = []
    while whole and offset < size:
        file.seek(offset)
        prefix = file.read(8)
        if prefix == END:
            return steps, True, 0
        length, stamp = _read_stamp(file, prefix, size - offset)
        if not length:
            # at most one incomplete step follows the full steps: the writer stops at its first failed write
            break
        if stamp is None or (steps and stamp <= steps[-1].number):
            raise StatisticsError(f"{path} is damaged at byte {offset}, after {len(steps)} steps")
        steps.append(StepLocation(stamp, offset, length))
        offset += length
    rest = size - offset
    if not rest and steps and not _is_good(file, steps[-1]):
        # after a crash of the machine the last step may consist of zeros
        return steps[:-1], False, steps[-1].length
    return steps, False, rest


def _read_header(file: Any, path: Path, size: int) -> tuple[int, bool]:
    """Return the offset of the header's end in bytes, and whether the header is complete."""
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
    """Return the size of the step that begins with `prefix` in bytes, 0 if it is incomplete, and its number."""
    if len(prefix) < 8:
        return 0, None
    mark, metadata_length = struct.unpack("<Ii", prefix)
    if mark != 0xFFFFFFFF or metadata_length <= 0:
        # a crash of the machine leaves zeros up to the end of the file; other bytes were changed later
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
    """Return the field ``bodyLength`` of Arrow's flatbuffer ``Message`` in bytes, -1 if the metadata are damaged."""
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
