"""Reads JSON that may come from a stranger.

A text that Python's parser cannot hold is a ValueError like any other, and so is one that says two things under one
name, of which every reader takes another.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ort_zero.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from ort_zero.checkpoint.files.storage import Folder

_SMALL = 1 << 20
"""Bytes up to which a file is read without a look at its end."""


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, names a value twice, or is nested more deeply than Python can follow.
    """
    try:
        return json.loads(text, object_pairs_hook=_table)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def read_object(folder: Folder, name: str, limit: int) -> bytes:
    """Return the bytes of a file that holds one JSON object.

    Args:
        folder: where it lies.
        name: its name.
        limit: most bytes that it may have.

    Raises:
        CorruptCheckpointError: it is missing, longer than `limit`, or does not end as an object does: what a disk that
            was full or a stranger has filled up with zeros is not read.
        CheckpointError: it cannot be read.
    """
    size = folder.size(name)
    if size is not None and _SMALL < size <= limit:
        ends = folder.read(name, 0, 64).lstrip()[:1], folder.read(name, size - 64, 64).rstrip()[-1:]
        if ends != (b"{", b"}"):
            raise CorruptCheckpointError(
                f"{folder.path(name)} is damaged: it is no JSON object from its start to its end"
            )
    return folder.read(name, limit=limit)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a table; raise ValueError if two have the same name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is there twice")
    return found
