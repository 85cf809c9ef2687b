"""The record of what an aggregation wrote into a folder: only what it names may be replaced or removed later.

Names such as ``model.safetensors`` or ``pytorch_model.bin`` are everybody's, so a name alone does not tell whose a file
is. The record lies beside the files; a file counts as ours if it is named there with the size that it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.allowed_names import is_output_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CheckpointError

NAME = ".ort_zero_output.json"
_FORMAT = "ort_zero.output"
_MAX_BYTES = 64 << 20


def read(folder: Folder) -> dict[str, int | None]:
    """Return the size in bytes of each file that the record names, None for one that was about to be written.

    A folder without a record, or with one that cannot be read, has none of ours: an empty table.
    """
    if not folder.exists(NAME):
        return {}
    try:
        table = json_text.loads(folder.read(NAME, limit=_MAX_BYTES))
        if table["format"] != _FORMAT:
            return {}
        return {
            name: size
            for name, size in table["files"].items()
            if is_output_name(name) and (size is None or type(size) is int)
        }
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(folder: Folder, files: Mapping[str, int | None], token: str) -> None:
    """Write the record.

    Args:
        folder: folder of the files.
        files: size in bytes by name; None for a file that is about to be written.
        token: tells this writer from others.
    """
    table = {"format": _FORMAT, "version": 1, "files": dict(sorted(files.items()))}
    folder.write(NAME, (json.dumps(table, indent=1) + "\n").encode(), token)


def ours_among(folder: Folder, names: Iterable[str]) -> frozenset[str]:
    """Return those of `names` that the record of the folder names, with the size that they have."""
    known = read(folder)
    found = {NAME}
    for name in names:
        if name in known and known[name] in (None, folder.size(name)):
            found.add(name)
    return frozenset(found)
