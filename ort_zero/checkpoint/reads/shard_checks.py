"""Check one file of ort_zero's format against the manifest: its size and its checksum."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from ort_zero.checkpoint.files import json_text, safetensors_header
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.pieces import PieceRuns
from ort_zero.checkpoint.records import File, Source
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_OF_A_SAVE = re.compile(r"rank_\d{5}_(master|optimizer|extra)(\.[0-9a-f]{8})?\.(safetensors|json)")
EXTRA_KEYS = ("tensor_shapes", "counters", "client_state", "lr_scheduler", "loss_scaler", "extra_state")
"""Keys of a rank's JSON file that loading needs."""
MAX_STEPS = 1 << 53
"""Bound of a number of steps or samples, exclusive: beyond it a float is no exact count."""
MAX_EXTRA_BYTES = 1 << 30
"""Maximum size in bytes of a rank's JSON file that is read; tensors are not in it."""
_MAX_NAMED = 3
"""Maximum number of damaged tensors of one file that a message names."""


def problem_of_shard(folder: Folder, file: File, source: Source, advance: Callable[[int], Any]) -> str | None:
    """Return the problem of one file, None if it is the file of the manifest. Every byte is read."""
    path, size = folder.path(file.name), folder.size(file.name)
    if size is None:
        return f"{path} is missing"
    if not size and file.size:
        return f"{path} is empty, the manifest says {file.size} bytes"
    if size == file.size:
        wrong = _wrong_extent(folder, file)
        if wrong:
            return f"{path} is damaged: {wrong}"
        digest = xxhash.xxh3_128()
        for block in folder.blocks(file.name, 0, size):
            digest.update(block)
            advance(len(block))
        if digest.hexdigest() == file.xxh3_128:
            return None
    if size != file.size:
        kind = "is truncated: it" if size < file.size else "is too long: it"
        return f"{path} {kind} has {size} bytes, the manifest says {file.size}"
    damaged = list(_damaged(folder, file, source))
    where = f", in {shortened(damaged, _MAX_NAMED)}" if damaged else ", outside of its tensors"
    return f"{path} is damaged: its content does not match its xxh3-128{where}"


def is_of_another_save(folder: Folder, name: str, source: Source) -> bool:
    """Return True for a rank's file, not in the manifest, of another save of the same tag.

    While a tag is saved again, its folder has files of both saves: new files before the new manifest, old ones after.
    """
    if not _OF_A_SAVE.fullmatch(name):
        return False
    try:
        save = _metadata(folder, name).get("save_id")
    except CheckpointError:
        return False
    return save is not None and save != source.save_id


def is_count(value: Any) -> bool:
    """Return True for a number of steps or samples: a whole number below :data:`MAX_STEPS`."""
    return type(value) is int and 0 <= value < MAX_STEPS


def _wrong_extent(folder: Folder, file: File) -> str | None:
    """Return a message if a file cannot have its size, else None; checked before terabytes of zeros are read."""
    if file.name.endswith(".json"):
        return None if file.size <= MAX_EXTRA_BYTES else f"{file.size} bytes are too many for it"
    try:
        entries = safetensors_header.read(folder, file.name).entries.values()
    except CorruptCheckpointError:
        return None  # the check of the file's bytes gives a better message
    end = max((entry.offset + entry.nbytes for entry in entries), default=file.size)
    return None if end == file.size else f"its tensors end at byte {end}, it has {file.size}"


def _damaged(folder: Folder, file: File, source: Source) -> Iterator[str]:
    """Yield the tensors with a piece in `file` that does not match its checksum."""
    index = list(source.files).index(file.name)
    for tensor in source.tensors:
        assert isinstance(tensor.pieces, PieceRuns), "the manifest's reader makes runs"
        for run in tensor.pieces.runs:
            if index in run.files():
                piece = tensor.pieces.piece(run, run.files().index(index))
                digest = xxhash.xxh3_64()
                for block in folder.blocks(file.name, piece.offset, piece.offset + piece.length):
                    digest.update(block)
                if digest.digest() != piece.check:
                    yield f"{tensor.kind} of {tensor.name}"


def _metadata(folder: Folder, name: str) -> dict[str, Any]:
    """Return what a file tells of its save and rank; empty if it cannot be read."""
    try:
        if not name.endswith(".json"):
            return safetensors_header.read(folder, name).metadata
        value = json_text.loads(json_text.read_object(folder, name, MAX_EXTRA_BYTES))
    except (ValueError, CorruptCheckpointError):
        return {}
    return value if isinstance(value, dict) else {}
