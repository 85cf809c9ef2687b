"""Write checksums beside a checkpoint whose format has none, and compare its files with them later.

The file ``ort_zero_seal.json`` has the size of each file and the CRC-32 of each of its blocks. The readers treat the
blocks as records (see :class:`~ort_zero.checkpoint.records.File`), so every later read compares what it read.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.reads.checked_reads import check_record
from ort_zero.checkpoint.records import File, Source
from ort_zero.errors import CorruptCheckpointError

NAME = "ort_zero_seal.json"
_FORMAT = "ort_zero.seal"
_BLOCK = 4 << 20  # bytes
_WAY_OUT = f"if that is right, remove {NAME} and run ort-zero verify --seal"
_MAX_BYTES = 256 << 20
"""Maximum size of a seal: 8 bytes of text for 4 MiB."""


def seal(folder: Folder, names: Iterable[str], advance: Callable[[int], Any]) -> str:
    """Write the checksums of the files `names`; return the path of the seal, which replaces an older one."""
    rows = {}
    for name in names:
        size = folder.size(name) or 0
        starts = range(0, size, _BLOCK)
        crcs = [folder.crc32(name, start, min(start + _BLOCK, size), advance=advance) for start in starts]
        rows[name] = {"size": size, "crc32": base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()}
    document = {"format": _FORMAT, "version": 1, "block": _BLOCK, "files": rows}
    folder.write(NAME, json.dumps(document, indent=1).encode(), "seal", durable=True)
    return folder.path(NAME)


def read_seal(folder: Folder) -> dict[str, File] | None:
    """Return what the seal says of each file, by the file's name; None if the checkpoint has no seal."""
    if not folder.exists(NAME):
        return None
    try:
        document = json_text.loads(json_text.read_object(folder, NAME, _MAX_BYTES))
        if (document["format"], document["version"]) != (_FORMAT, 1):
            raise ValueError(f"its format is {document['format']} {document['version']}")
        block, rows = document["block"], document["files"]
        return {name: _file(name, row["size"], row["crc32"], block) for name, row in rows.items()}
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise CorruptCheckpointError(
            f"{folder.path(NAME)} is damaged ({error!r}); remove it if you do without the seal"
        ) from None


def _file(name: str, size: int, text: str, block: int) -> File:
    data = base64.b64decode(text, validate=True)
    crcs = struct.unpack(f"<{len(data) // 4}I", data)
    if type(size) is not int or type(block) is not int or size < 0 or block < 1:
        raise ValueError(f"{name} has {size} bytes in blocks of {block}")
    if len(crcs) != -(-size // block):
        raise ValueError(f"{name} has {len(crcs)} checksums for {size} bytes")
    records = tuple((i * block, min(block, size - i * block), crc) for i, crc in enumerate(crcs))
    return File(name=name, size=size, records=records)


def with_seal(source: Source, folder: Folder) -> Source:
    """Return the checkpoint with the checksums of its seal, if it has one.

    The bytes that no reader of tensors compares are compared here: files without tensors, and headers.
    """
    sealed = read_seal(folder)
    if sealed is None:
        return source
    for name in dict.fromkeys((*source.files, *sealed)):
        problem = size_problem(folder, name, sealed)
        if problem:
            raise CorruptCheckpointError(problem)
        end = sealed[name].size
        if name in source.files:
            has_header = name.endswith(".safetensors")
            end = 8 + int.from_bytes(folder.read(name, 0, 8), "little") if has_header else 0
        for record in sealed[name].records:
            if record[0] < end:
                check_record(folder, sealed[name], record, ())
    return replace(source, files={name: sealed[name] for name in source.files})


def size_problem(folder: Folder, name: str, sealed: Mapping[str, File]) -> str | None:
    """Return a sentence if a file is not sealed, or has another size than when it was sealed."""
    if name not in sealed:
        return f"{folder.path(name)} is not in {NAME}: it was added after the seal; {_WAY_OUT}"
    size = folder.size(name)
    if size != sealed[name].size:
        was = sealed[name].size
        return f"{folder.path(name)} has {size or 0} bytes, {was} when it was sealed: it was changed; {_WAY_OUT}"
    return None
