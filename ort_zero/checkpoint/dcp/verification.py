"""Check every byte of a checkpoint of ``torch.distributed.checkpoint`` that a checksum covers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ort_zero.checkpoint.dcp.metadata import NAME, Shard
from ort_zero.checkpoint.dcp.reader import SUFFIX, entries_of, part_names
from ort_zero.checkpoint.dcp.sections import Section
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.torch_file import crc_is_right, read_records
from ort_zero.errors import CheckpointError


def shards_of(folder: Folder, source: Source) -> dict[str, list[tuple[str, Shard]]]:
    """Return (key, shard) of each shard by file, in the order of the files' bytes.

    Files of single ranks, and of safetensors, are one shard each.
    """
    if not part_names(folder):
        return {file.name: [(file.name, Shard((), (), file.name, 0, file.size))] for file in source.files.values()}
    found: dict[str, list[tuple[str, Shard]]] = {}
    for entry in entries_of(folder):
        for shard in entry.shards:
            found.setdefault(shard.file, []).append((entry.key, shard))
    return {name: sorted(shards, key=lambda item: item[1].offset) for name, shards in sorted(found.items())}


def metadata_files(folder: Folder) -> list[str]:
    """Return the files of metadata."""
    return [f"{part}/{NAME}".lstrip("/") for part in part_names(folder)]


def surplus_files(folder: Folder, known: Sequence[str]) -> list[str]:
    """Return the files of shards in a checkpoint that its metadata do not name."""
    names = [f"{part}/{name}".lstrip("/") for part in part_names(folder) for name in folder.child(part).names()]
    return [name for name in names if name.endswith(SUFFIX) and name not in known]


def problems_of_file(
    folder: Folder,
    name: str,
    shards: Sequence[tuple[str, Shard]],
    buffer: memoryview,
    advance: Callable[[int], Any],
    unchecked: list[str],
) -> Iterator[str]:
    """Yield the problems of one file: zips that are damaged, and records whose CRC-32 differs.

    Args:
        folder: folder of the checkpoint.
        name: name of the file.
        shards: (key, shard) of the file's shards, in the order of its bytes.
        buffer: memory for reading.
        advance: called with the number of bytes that were read.
        unchecked: gets the keys of shards without checksums.
    """
    if name.endswith(".safetensors"):  # no checksums
        unchecked.append(name)
        return
    position = 0
    for key, shard in shards:
        if shard.offset < position:
            yield f"{folder.path(name)}: the shard of {key} begins at byte {shard.offset}, within the one before it"
        position = shard.offset + shard.length
        section = Section(folder, shard)
        try:
            records = read_records(section, name)
        except CheckpointError as error:
            yield f"{key}: {error}"
            continue
        if any(record.length and record.crc is None for record in records):
            unchecked.append(key)
        for record in records:
            if not crc_is_right(section, name, record, buffer):
                yield f"{section.path()} is damaged: the CRC-32 of {record.name} of {key} is wrong"
            advance(record.length)
