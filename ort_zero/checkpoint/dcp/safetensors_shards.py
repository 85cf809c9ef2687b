"""Read the folders of torch's ``HuggingFaceStorageWriter``: safetensors files whose headers say where shards belong."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ort_zero.checkpoint.dcp.assembly import CheckpointContents, Entry
from ort_zero.checkpoint.dcp.blocks import Block, shape_of
from ort_zero.checkpoint.files import json_text, safetensors_header
from ort_zero.checkpoint.files.dtypes import name_of
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_NAME = re.compile(r"(?:shard-(\d+)-)?model-(\d+)-of-(\d+)\.safetensors")
"""Matches the names of files; groups: number of the rank, number of the file, number of files of the rank."""
_OFFSETS = "DCP_SHARDING_INFO"
"""Key in a header's metadata: JSON of the offsets of the file's shards, by tensor (``_hf_utils.py`` of torch 2.13)."""


def file_names(folder: Folder, listed: Sequence[str]) -> list[str]:
    """Return the files of shards among the names in `folder`; none for a model that other programs wrote."""
    names = [name for name in listed if _NAME.fullmatch(name)]
    try:
        return names if names and _OFFSETS in safetensors_header.read(folder, names[0]).metadata else []
    except CheckpointError:
        return names if any(name.startswith("shard-") for name in names) else []


def _refuse_gaps(folder: Folder, files: Sequence[str]) -> None:
    counts: dict[int, tuple[set[int], int]] = {}
    for match in filter(None, map(_NAME.fullmatch, files)):
        counts.setdefault(int(match[1] or 0), (set(), int(match[3])))[0].add(int(match[2]))
    ranks = counts.keys() - {0}
    gaps = [f"shard-{rank:05d}" for rank in range(1, 1 + len(ranks)) if rank not in ranks]
    for rank, (numbers, count) in counts.items():
        missing = [number for number in range(1, 1 + len(numbers)) if number not in numbers]
        if missing or count != len(numbers):
            gaps.append(f"number {(*missing, len(numbers) + 1)[0]} of {count} of shard {rank}")
    if gaps:
        raise CorruptCheckpointError(f"{folder.path()}: files are missing: {', '.join(gaps[:3])}")


def read_shards(contents: CheckpointContents) -> None:
    """Add what the headers of the files list."""
    folder = contents.folder
    files = file_names(folder, folder.names())
    _refuse_gaps(folder, files)
    contents.world_size = len(files)
    contents.notes.append(
        f"the files do not say how many ranks saved: {len(files)} are there, and a missing last one is not noticed"
    )
    entries: dict[str, Entry] = {}
    for name in files:
        header = safetensors_header.read(folder, name)
        contents.records[name] = set()
        try:
            places = json_text.loads(header.metadata[_OFFSETS])
            for key, (_, code, sizes, begin, _) in header.entries.items():
                block = Block(shape_of(places[key]["saved_offsets"]), sizes, name, begin)
                entry = entries.setdefault(key, Entry((key,), name_of(code), sizes))
                if entry.dtype != name_of(code) or entry.blocks.setdefault(block.offsets, block) is not block:
                    raise ValueError(f"{key} has another dtype in another file, or the same offsets")
                ends = (offset + size for offset, size in zip(block.offsets, sizes, strict=True))
                entry.shape = tuple(map(max, entry.shape, ends))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{folder.path(name)} is damaged: its header lacks places ({error})") from None
    contents.entries += entries.values()
