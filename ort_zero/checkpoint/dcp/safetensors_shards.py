"""Read the folders of torch's ``HuggingFaceStorageWriter``: safetensors files whose headers say where shards belong."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ort_zero.checkpoint.dcp.assembly import CheckpointContents
from ort_zero.checkpoint.dcp.blocks import Block
from ort_zero.checkpoint.dcp.names import meanings
from ort_zero.checkpoint.files import json_text, safetensors_header
from ort_zero.checkpoint.files.dtypes import is_dtype_code, name_of
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_NAME = re.compile(r"(shard-(\d+)-)?model-(\d+)-of-(\d+)\.safetensors")
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
        _, rank, number, count = match.groups()
        counts.setdefault(int(rank or 0), (set(), int(count)))[0].add(int(number))
    ranks = counts.keys() - {0}
    gaps = [f"shard-{rank:05d}" for rank in range(1, 1 + len(ranks)) if rank not in ranks]
    for rank, (numbers, count) in counts.items():
        missing = [number for number in range(1, 1 + len(numbers)) if number not in numbers]
        if missing or count != len(numbers):
            gaps.append(f"number {(*missing, len(numbers) + 1)[0]} of {count} of shard {rank}")
    if gaps:
        raise CorruptCheckpointError(f"{folder.path()}: files are missing: {', '.join(gaps[:3])}")


def read_shards(contents: CheckpointContents) -> None:
    folder = contents.folder
    blocks: dict[str, list[Block]] = {}
    dtypes: dict[str, str] = {}
    files = file_names(folder, folder.names())
    _refuse_gaps(folder, files)
    contents.notes.append(
        f"the files do not say how many ranks saved: {len(files)} are there, and a missing last one is not noticed"
    )
    for name in files:
        header = safetensors_header.read(folder, name)
        contents.records.setdefault(name, set())
        try:
            places = json_text.loads(header.metadata[_OFFSETS])
            for key, entry in header.entries.items():
                offsets = tuple(places[key]["saved_offsets"])
                if len(offsets) != len(entry.shape) or any(type(n) is not int or n < 0 for n in offsets):
                    raise ValueError(f"the offsets of {key} do not fit to its shape")
                if not is_dtype_code(entry.dtype) or dtypes.setdefault(key, entry.dtype) != entry.dtype:
                    raise ValueError(f"the dtype of {key} is {entry.dtype}, in another file {dtypes.get(key)}")
                blocks.setdefault(key, []).append(Block(offsets, entry.shape, name, entry.offset))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{folder.path(name)} is damaged: its header lacks places ({error})") from None
    contents.world_size = len(files)
    for (key, found), meaning in zip(blocks.items(), meanings([(key,) for key in blocks])):
        ends = zip(*([o + n for o, n in zip(block.offsets, block.sizes)] for block in found))
        contents.add(key, meaning, name_of(dtypes[key]), tuple(map(max, ends)), found)
