"""Read JSON that may come from an attacker.

Unlike Python's parser, :func:`loads` raises a ValueError for JSON that is nested too deeply. It also refuses two values
of one name, of which different readers would take different values.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from ort_zero.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from ort_zero.checkpoint.files.storage import Folder

_SMALL_FILE = 1 << 20
"""Maximum size in bytes of a file that is read without a check of its end."""


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; raise ValueError for a name twice in one object, or too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_table)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def read_object(folder: Folder, name: str, limit: int) -> bytes:
    """Return the bytes of a file that holds one JSON object."""
    size = folder.size(name)
    if size is not None and _SMALL_FILE < size <= limit:
        ends = folder.read(name, 0, 64).lstrip()[:1], folder.read(name, size - 64, 64).rstrip()[-1:]
        if ends != (b"{", b"}"):
            raise CorruptCheckpointError(f"{folder.path(name)} is damaged: it is no JSON object")
    return folder.read(name, limit=limit)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise ValueError if two pairs have the same name."""
    table = dict(pairs)
    if len(table) != len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated!r} occurs twice in one object")
    return table
