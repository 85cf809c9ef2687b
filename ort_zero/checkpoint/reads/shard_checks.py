"""Check one file of ort_zero's format against the manifest: its size, checksum, save and rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import xxhash

from ort_zero.checkpoint.files import json_text, safetensors_header
from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.records import File, Piece, Tensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

if TYPE_CHECKING:
    from ort_zero.checkpoint.format.manifest_schema import Manifest

_RANK = re.compile(r"rank_(\d+)_")
_OF_A_SAVE = re.compile(r"rank_\d{5}_(master|optimizer|extra)(\.[0-9a-f]{8})?\.(safetensors|json)")
_EXTRA = re.compile(r"_extra(\.[0-9a-f]{8})?\.safetensors$")
EXTRA_KEYS = ("tensor_shapes", "counters", "client_state", "lr_scheduler", "loss_scaler", "extra_state")
"""Keys of a rank's JSON file that loading needs."""
MAX_STEPS = 1 << 53
"""Bound of a number of steps or samples, exclusive: beyond it a float is no exact count."""
MAX_EXTRA_BYTES = 1 << 30
"""Maximum size in bytes of a rank's JSON file that is read; tensors are not in it."""
_MAX_NAMED = 3
"""Maximum number of damaged tensors of one file that a message names."""
_buffers = threading.local()


def problems_of_shard(
    folder: Folder,
    file: File,
    manifest: Manifest,
    pieces: list[tuple[Tensor, Piece]],
    advance: Callable[[int], Any],
) -> Iterator[str]:
    """Yield the problems of one file. Every byte is read.

    The bytes are compared with their checksum. The header (tensors, dtypes, places, step, tag, world size, rank) is
    compared with the manifest, which also reveals an edited manifest.

    Args:
        folder: folder of the checkpoint.
        file: the file as the manifest lists it.
        manifest: manifest of the checkpoint.
        pieces: pieces of the file in the manifest, see :class:`~ort_zero.checkpoint.piece_runs.PiecesByFile`.
        advance: called with the number of bytes of each read.

    Raises:
        CorruptCheckpointError: the file becomes shorter while it is read.
        CheckpointError: the file cannot be read.
    """
    path, size = folder.path(file.name), folder.size(file.name)
    if size is None:
        yield f"{path} is missing"
        return
    if not size and file.size:
        yield f"{path} is empty, the manifest says {file.size} bytes"
        return
    damaged = None
    wrong = _wrong_extent(folder, file) if size == file.size else None
    if wrong:
        yield f"{path} is damaged: {wrong}"
        return
    if size == file.size:
        digest = xxhash.xxh3_128()
        checks = _PieceChecks(pieces)
        position = 0
        for part in _chunks(folder, file.name, 0, size):
            digest.update(part)
            checks.update(position, part)
            advance(len(part))
            position += len(part)
        damaged = checks.damaged()
        if digest.hexdigest() == file.xxh3_128:
            if damaged:
                yield f"{path} and the manifest disagree: the checksum differs of {shortened(damaged, _MAX_NAMED)}"
            else:
                yield from disagreements(folder, file, manifest, pieces)
            return
    other = _other_owner(_metadata(folder, file.name, size), file.name, manifest)
    if other:
        yield f"{path} {other}"
    elif size != file.size:
        kind = "is truncated: it" if size < file.size else "is too long: it"
        yield f"{path} {kind} has {size} bytes, the manifest says {file.size}"
    else:
        where = f", in {shortened(damaged, _MAX_NAMED)}" if damaged else ", outside of its tensors"
        yield f"{path} is damaged: its content does not match its xxh3-128{where}"


def is_of_another_save(folder: Folder, name: str, manifest: Manifest) -> bool:
    """Return True for a rank's file of another save of the same tag, of which there is no manifest.

    While a tag is saved again, its folder has files of both saves: new files before the new manifest, old ones after.

    Args:
        folder: folder of the checkpoint.
        name: name of a file that the manifest does not list.
        manifest: manifest of the checkpoint.
    """
    if not _OF_A_SAVE.fullmatch(name):
        return False
    try:
        save = _metadata(folder, name, folder.size(name) or 0).get("save_id")
    except CheckpointError:
        return False
    return save is not None and save != manifest.save_id


def is_count(value: Any) -> bool:
    """Return True for a number of steps or samples: a whole number below :data:`MAX_STEPS`."""
    return type(value) is int and 0 <= value < MAX_STEPS


def thread_buffer(folder: Folder) -> memoryview:
    """Return a buffer that this thread reuses, of the best size for a read from `folder`."""
    size = max(CHUNK, folder.block)
    if len(getattr(_buffers, "chunk", b"")) < size:
        _buffers.chunk = memoryview(bytearray(size))
    return _buffers.chunk[:size]


def _chunks(folder: Folder, name: str, offset: int, length: int) -> Iterator[memoryview]:
    """Yield `length` bytes of a file from `offset` on in chunks, in a buffer that is reused."""
    buffer = thread_buffer(folder)
    for done in range(0, length, len(buffer)):
        part = buffer[: min(len(buffer), length - done)]
        folder.read_into(name, offset + done, part)
        yield part


class _PieceChecks:
    """The checksums of the pieces of one file, computed while it is read from start to end."""

    def __init__(self, pieces: list[tuple[Tensor, Piece]]):
        self._pieces = pieces
        self._first = 0
        self._digests: dict[int, Any] = {}
        self._damaged: list[str] = []

    def update(self, position: int, part: memoryview) -> None:
        """Add bytes of the file from `position` on."""
        end = position + len(part)
        for index in range(self._first, len(self._pieces)):
            tensor, piece = self._pieces[index]
            if piece.offset >= end:
                break
            low, high = max(piece.offset, position), min(piece.offset + piece.length, end)
            if low < high:
                digest = self._digests.setdefault(index, xxhash.xxh3_64())
                digest.update(part[low - position : high - position])
            if piece.offset + piece.length <= end and index in self._digests:
                if piece.check is not None and self._digests.pop(index).hexdigest() != piece.check:
                    self._damaged.append(f"{tensor.kind} of {tensor.name}")
                if index == self._first:
                    self._first += 1

    def damaged(self) -> list[str]:
        """Return the tensors whose bytes do not match the checksum in the manifest."""
        return self._damaged


def disagreements(folder: Folder, file: File, manifest: Manifest, pieces: list[tuple[Tensor, Piece]]) -> Iterator[str]:
    """Yield one sentence per contradiction between an undamaged file and the manifest."""
    path = folder.path(file.name)
    try:
        metadata, entries = _read(folder, file.name, file.size)
    except ValueError as error:
        yield f"{path} is damaged: {error}"
        return
    other = _other_owner(metadata, file.name, manifest)
    if other:
        yield f"{path} {other}"
        return
    for key, stated in (("step", manifest.step), ("tag", manifest.tag), ("world_size", manifest.world_size)):
        if str(metadata.get(key, stated)) != str(stated):
            yield f"{path} and the manifest disagree: {key} is {metadata[key]} in the file, {stated} in the manifest"
    if file.name.endswith(".json"):
        yield from (f"{path} lacks {key!r}" for key in EXTRA_KEYS if key not in metadata)
        counters = metadata.get("counters")
        if isinstance(counters, dict) and not all(is_count(value) for value in counters.values()):
            yield f"{path}: the counters cannot be {str(counters)[:200]}"
    elif not _EXTRA.search(file.name):
        listed = {(p.offset, p.length): (t.dtype, {t.name, f"{t.kind}/{t.name}"}) for t, p in pieces}
        stored = {(e.offset, e.nbytes): (e.dtype, e.name) for e in entries.values() if e.nbytes}
        for place, (dtype, name) in stored.items():
            if place not in listed:
                yield f"{path} holds {name}, which the manifest does not list"
            elif listed[place][0] != dtype or name not in listed[place][1]:
                wanted = f"{max(listed[place][1], key=len)} ({listed[place][0]})"
                yield f"{path} and the manifest disagree: {name} ({dtype}) in the file, {wanted} in the manifest"
        for place in listed.keys() - stored.keys():
            yield f"{path} holds no tensor at byte {place[0]}, where {max(listed[place][1], key=len)} should be"


def _wrong_extent(folder: Folder, file: File) -> str | None:
    """Return a message if a file cannot have its size, else None; checked before terabytes of zeros are read."""
    if file.name.endswith(".json"):
        return None if file.size <= MAX_EXTRA_BYTES else f"{file.size} bytes are too many for it"
    try:
        entries = safetensors_header.read(folder, file.name, file.size).entries.values()
    except (ValueError, CorruptCheckpointError):
        return None  # the check of the file's bytes gives a better message
    end = max((entry.offset + entry.nbytes for entry in entries), default=file.size)
    return None if end == file.size else f"its tensors end at byte {end}, it has {file.size}"


def _read(folder: Folder, name: str, size: int) -> safetensors_header.Header:
    """Return the header of a file; the metadata of a JSON file are its values.

    Raises:
        ValueError: the header cannot be read.
    """
    if not name.endswith(".json"):
        return safetensors_header.read(folder, name, size)
    value = json_text.loads(json_text.read_object(folder, name, MAX_EXTRA_BYTES))
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return safetensors_header.Header(value, {})


def _metadata(folder: Folder, name: str, size: int) -> dict[str, Any]:
    """Return the metadata of a file, such as its save and rank; empty if they cannot be read."""
    try:
        return _read(folder, name, size).metadata
    except (ValueError, CorruptCheckpointError):
        return {}


def _other_owner(metadata: dict[str, Any], name: str, manifest: Manifest) -> str | None:
    """Return which other run, save or rank a file belongs to; None for this checkpoint and rank."""
    run, save, rank = (metadata.get(key) for key in ("run_id", "save_id", "rank"))
    if run is not None and run != manifest.run_id:
        return "belongs to another run"
    if save is not None and save != manifest.save_id:
        details = [f"{key} {metadata[key]}" for key in ("step", "tag") if key in metadata]
        return "belongs to another save" + (f" ({', '.join(details)})" if details else "")
    name_match = _RANK.match(name)
    if rank is not None and name_match and str(rank).isdigit() and int(rank) != int(name_match.group(1)):
        return f"is rank {int(rank)}'s file"
    return None
