"""Read and write the record of the files that an aggregation wrote; only these may be replaced or removed later.

Many programs write ``model.safetensors`` or ``pytorch_model.bin``, so a file's name does not tell which program wrote
the file. The record lies beside the files. ort_zero wrote a file if the record has the file's name and current size.
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
    """Return the size in bytes of each file in the record, None for a file that was about to be written.

    The result is empty for a folder without a record, and for a record that cannot be read.
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
        folder: folder of the files and the record.
        files: size in bytes by name; None for a file that is about to be written.
        token: part of the name of the temporary file; differs between processes that write into the folder.
    """
    table = {"format": _FORMAT, "version": 1, "files": dict(sorted(files.items()))}
    folder.write(NAME, (json.dumps(table, indent=1) + "\n").encode(), token)


def recorded_among(folder: Folder, names: Iterable[str]) -> frozenset[str]:
    """Return the `names` of files that an aggregation wrote: the record has each name and the file's current size."""
    recorded_sizes = read(folder)
    recorded = {NAME}
    for name in names:
        if name in recorded_sizes and recorded_sizes[name] in (None, folder.size(name)):
            recorded.add(name)
    return frozenset(recorded)
