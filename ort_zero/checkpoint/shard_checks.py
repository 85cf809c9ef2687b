"""Checks one file of our format against the manifest: its size, its checksum, and to which save and rank it belongs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from ort_zero.checkpoint import json_text, safetensors_header
from ort_zero.checkpoint.manifest import Manifest
from ort_zero.checkpoint.records import File, Source
from ort_zero.checkpoint.storage import CHUNK, Folder
from ort_zero.errors import CorruptCheckpointError
from ort_zero.utils.text import shortened

_RANK = re.compile(r"rank_(\d+)_")
_MOST_NAMED = 3
"""Maximum number of damaged tensors of one file that a message names."""
_buffers = threading.local()


def problems_of_shard(
    folder: Folder, file: File, manifest: Manifest, source: Source, advance: Callable[[int], Any]
) -> Iterator[str]:
    """Yield what is wrong with one file, at most one sentence. Every byte is read.

    Args:
        folder: folder of the checkpoint.
        file: as the manifest lists it.
        manifest: manifest of the checkpoint.
        source: what the manifest describes.
        advance: called with the bytes that were read.

    Raises:
        CorruptCheckpointError: the file becomes shorter meanwhile.
        CheckpointError: it cannot be read.
    """
    path, size = folder.path(file.name), folder.size(file.name)
    if size is None:
        yield f"{path} is missing"
        return
    if not size and file.size:
        yield f"{path} is empty, the manifest says {file.size} bytes"
        return
    if size == file.size:
        digest = xxhash.xxh3_128()
        for part in _chunks(folder, file.name, 0, size):
            digest.update(part)
            advance(len(part))
        if digest.hexdigest() == file.xxh3_128:
            return
    other = _other_owner(_metadata(folder, file.name, size), file.name, manifest)
    if other:
        yield f"{path} {other}"
    elif size != file.size:
        kind = "is truncated: it" if size < file.size else "is too long: it"
        yield f"{path} {kind} has {size} bytes, the manifest says {file.size}"
    else:
        yield f"{path} is damaged: its content does not match its xxh3-128{_damaged_tensors(folder, file, source)}"


def thread_buffer() -> memoryview:
    """Return a buffer of one chunk that belongs to this thread and is used again."""
    if not hasattr(_buffers, "chunk"):
        _buffers.chunk = memoryview(bytearray(CHUNK))
    return _buffers.chunk


def _chunks(folder: Folder, name: str, offset: int, length: int) -> Iterator[memoryview]:
    """Yield `length` bytes of a file from `offset` on, a chunk or less at a time, in a buffer that is used again."""
    for done in range(0, length, CHUNK):
        part = thread_buffer()[: min(CHUNK, length - done)]
        folder.read_into(name, offset + done, part)
        yield part


def _metadata(folder: Folder, name: str, size: int) -> dict[str, Any]:
    """Return what a file says of the save and the rank it belongs to; empty if it says nothing that can be read."""
    try:
        if name.endswith(".json"):
            value = json_text.loads(folder.read(name))
        else:
            value = safetensors_header.read_metadata(folder, name, size)
        return value if isinstance(value, dict) else {}
    except (ValueError, CorruptCheckpointError):
        return {}


def _other_owner(metadata: dict[str, Any], name: str, manifest: Manifest) -> str | None:
    """Return to what else a file belongs, None if to this very checkpoint and rank."""
    run, save, rank = (metadata.get(key) for key in ("run_id", "save_id", "rank"))
    if run is not None and run != manifest.run_id:
        return "belongs to another run"
    if save is not None and save != manifest.save_id:
        known = [f"{key} {metadata[key]}" for key in ("step", "tag") if key in metadata]
        return "belongs to another save" + (f" ({', '.join(known)})" if known else "")
    mine = _RANK.match(name)
    if rank is not None and mine and str(rank).isdigit() and int(rank) != int(mine.group(1)):
        return f"is rank {int(rank)}'s file"
    return None


def _damaged_tensors(folder: Folder, file: File, source: Source) -> str:
    """Return ", in ..." with the tensors of `file` whose own checksums are wrong, or that the damage is in none."""
    names = []
    for tensor in source.tensors:
        for piece in tensor.pieces:
            if piece.file != file.name or piece.check is None:
                continue
            digest = xxhash.xxh3_64()
            for part in _chunks(folder, file.name, piece.offset, piece.length):
                digest.update(part)
            if digest.hexdigest() != piece.check:
                names.append(f"{tensor.kind} of {tensor.name}")
    return f", in {shortened(names, _MOST_NAMED)}" if names else ", outside of its tensors"
