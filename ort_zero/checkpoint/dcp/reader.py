"""Open a checkpoint of ``torch.distributed.checkpoint``, or files of single ranks, without the tensors' data."""

from __future__ import annotations

import re
from dataclasses import replace

from ort_zero.checkpoint.dcp import metadata, names, rank_files, safetensors_shards
from ort_zero.checkpoint.dcp.assembly import CheckpointContents, Value, source_of
from ort_zero.checkpoint.dcp.metadata import Entry, read_metadata
from ort_zero.checkpoint.dcp.names import meanings
from ort_zero.checkpoint.dcp.sections import Section, block_of
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.torch_file import Contents, open_torch_file, read_number
from ort_zero.errors import CorruptCheckpointError

SUFFIX = ".distcp"
_OF_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""The folders of ``accelerator.save_state`` and of the Trainer under FSDP."""
_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def recognises(folder: Folder) -> bool:
    """Return True if the folder holds a checkpoint that :func:`open_dcp` opens, or one whose save was interrupted."""
    listed = folder.names()
    return bool(part_names(folder) or rank_files.files_by_kind(listed) or safetensors_shards.file_names(folder, listed))


def part_names(folder: Folder) -> list[str]:
    """Return the names of the inner folders that make up the checkpoint in `folder`: "" for the folder itself."""
    listed = folder.names()
    if metadata.NAME in listed or any(name.endswith(SUFFIX) for name in listed):
        return [""]
    inner = [name for name in listed if _OF_ACCELERATE.fullmatch(name)]
    return [name for name in inner if folder.exists(f"{name}/{metadata.NAME}")]


def entries_of(folder: Folder) -> list[Entry]:
    """Return the entries of all parts of a checkpoint; their files are relative to `folder`.

    Raises:
        CorruptCheckpointError: the metadata are missing or damaged.
    """
    entries = []
    for part in part_names(folder):
        inner = folder.child(part) if part else folder
        if not inner.exists(metadata.NAME):
            raise CorruptCheckpointError(f"{inner.path(metadata.NAME)} is missing: the save was interrupted")
        for entry in read_metadata(inner):
            shards = (shard._replace(file=f"{part}/{shard.file}".lstrip("/")) for shard in entry.shards)
            entries.append(replace(entry, shards=tuple(shards)))
    return entries


def open_dcp(folder: Folder) -> Source:
    """Return the checkpoint in `folder`, having checked that its shards cover each tensor once.

    Raises:
        CorruptCheckpointError: a file is missing or damaged, or elements of a tensor are in no shard or in two.
        CheckpointError: the checkpoint holds something that ort_zero does not read.
    """
    contents = CheckpointContents(folder)
    if part_names(folder):
        _read_shards(contents)
    elif rank_files.files_by_kind(folder.names()):
        rank_files.read_rank_files(contents)
    else:
        safetensors_shards.read_shards(contents)
    return source_of(contents)


def _read_shards(contents: CheckpointContents) -> None:
    """Add everything in the files of ``torch.distributed.checkpoint``."""
    folder, entries = contents.folder, entries_of(contents.folder)
    cache: Contents = {}
    ranks = {match[1] for entry in entries for s in entry.shards if (match := _RANK.fullmatch(s.file))}
    contents.world_size = len(ranks) or 1
    for entry, meaning in zip(entries, meanings([entry.path for entry in entries])):
        if meaning.kind == names.OTHER:
            contents.others.append(entry.key)
            continue
        blocks, strides, content, number, checksums = [], None, None, None, []
        for shard in entry.shards:
            section = Section(folder, shard)
            opened = open_torch_file(section, shard.file, cache=cache)
            found = contents.records.setdefault(shard.file, set())
            found.update((shard.offset + offset, length, crc) for offset, length, crc in opened.file.records)
            content = opened.content
            if entry.dtype is not None:
                block, strides = block_of(entry, shard, content)
                blocks.append(block)
                if not entry.shape and meaning.kind != names.WEIGHT:
                    number = read_number(section, opened.file, content)
                checksums += [(shard.offsets, n, c) for at, n, c in opened.file.records if at == content.storage_offset]
        if entry.dtype is None:
            contents.values.append(Value(meaning, None, content))
        else:
            contents.add(entry.key, meaning, entry.dtype, entry.shape, blocks, strides, number)
            if meaning.kind == names.WEIGHT and len(checksums) == len(blocks):
                contents.checksums[str(meaning.name)] = tuple(sorted(checksums))
