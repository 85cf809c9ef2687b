"""Open a checkpoint of ``torch.distributed.checkpoint``, or files of single ranks, without the tensors' data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ort_zero.checkpoint.dcp import metadata, names, rank_files, safetensors_shards
from ort_zero.checkpoint.dcp.assembly import CheckpointContents, source_of
from ort_zero.checkpoint.dcp.blocks import Block
from ort_zero.checkpoint.dcp.metadata import Entry, Shard, read_metadata
from ort_zero.checkpoint.dcp.names import Value, meanings
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import Contents, open_torch_file, read_number, read_records
from ort_zero.errors import CheckpointError, CorruptCheckpointError

SUFFIX = ".distcp"
_MODEL = "pytorch_model_fsdp_"
_OF_ACCELERATE = re.compile(rf"({_MODEL}|optimizer_)\d+")
"""The folders of ``accelerator.save_state`` and of the Trainer under FSDP."""
_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def recognises(folder: Folder) -> bool:
    """Return True if the folder holds a checkpoint that :func:`open_dcp` opens, or one whose save was interrupted."""
    listed = folder.names()
    return bool(part_names(folder) or rank_files.files_by_kind(listed) or safetensors_shards.file_names(folder, listed))


def part_names(folder: Folder) -> list[str]:
    """Return the names of the inner folders that make up the checkpoint in `folder`: "" for the folder itself."""
    listed = folder.names()
    if any(map(_is_of_torch, listed)):
        return [""]
    inner = [name for name in listed if _OF_ACCELERATE.fullmatch(name)]
    parts = [name for name in inner if any(map(_is_of_torch, folder.child(name).names()))]
    # of several models each is a checkpoint of its own: the user says which
    return parts if sum(name.startswith(_MODEL) for name in parts) < 2 else []


def _is_of_torch(name: str) -> bool:
    return name == metadata.NAME or name.endswith(SUFFIX)


def entries_of(folder: Folder) -> list[Entry]:
    """Return the entries of all parts of a checkpoint; their files are relative to `folder`."""
    entries = []
    for part in part_names(folder):
        inner = folder.child(part) if part else folder
        if not inner.exists(metadata.NAME):
            raise CorruptCheckpointError(f"{inner.path(metadata.NAME)} is missing: the save was interrupted")
        for entry in read_metadata(inner):
            shards = (shard._replace(file=f"{part}/{shard.file}".lstrip("/")) for shard in entry.shards)
            path = entry.path if part.startswith(_MODEL) or not part else (part, *entry.path)
            entries.append(replace(entry, path=path, shards=tuple(shards)))
    return entries


def metadata_files(folder: Folder) -> list[str]:
    """Return the files of metadata."""
    return [f"{part}/{metadata.NAME}".lstrip("/") for part in part_names(folder)]


def surplus_files(source: Source, folder: Folder) -> list[str]:
    """Return the files of shards that the metadata do not name."""
    listed = [f"{part}/{name}".lstrip("/") for part in part_names(folder) for name in folder.child(part).names()]
    return [name for name in listed if name.endswith(SUFFIX) and name not in source.files]


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
    _refuse_overlaps(folder, entries)
    cache: Contents = {}
    ranks = {match[1] for entry in entries for s in entry.shards if (match := _RANK.fullmatch(s.file))}
    contents.world_size = len(ranks) or 1
    for entry, meaning in zip(entries, meanings([entry.path for entry in entries])):
        if meaning.kind == names.OTHER:
            contents.others.append(entry.key)
            for shard in entry.shards:
                found = contents.records.setdefault(shard.file, set())
                found.update(read_records(folder, shard.file, shard.offset, shard.length))
            continue
        blocks, strides, content, number, checksums = [], None, None, None, []
        for shard in entry.shards:
            opened = open_torch_file(folder, shard.file, cache=cache, start=shard.offset, length=shard.length)
            contents.records.setdefault(shard.file, set()).update(opened.file.records)
            content = opened.content
            if entry.dtype is not None:
                block, strides = _block_of(entry, shard, content)
                blocks.append(block)
                is_number = not entry.shape or (meaning.kind == names.OPTION and set(entry.shape) == {1})
                if is_number and meaning.kind != names.WEIGHT:
                    number = read_number(folder, opened, content)
                storage = shard.offset + content.storage_offset
                checksums += [(shard.offsets, n, c) for at, n, c in opened.file.records if at == storage]
        if entry.dtype is None and meaning.kind == names.WEIGHT:
            contents.others.append(entry.key)
        elif entry.dtype is None:
            contents.values.append(Value(meaning, None, content))
        else:
            contents.add(entry.key, meaning, entry.dtype, entry.shape, blocks, strides, number)
            if meaning.kind == names.WEIGHT and len(blocks) > 1:
                contents.divided.add(str(meaning.name))
            if meaning.kind == names.WEIGHT and len(checksums) == len(blocks):
                contents.checksums[str(meaning.name)] = (strides, *sorted(checksums))


def _refuse_overlaps(folder: Folder, entries: Sequence[Entry]) -> None:
    """Raise CorruptCheckpointError if two shards share bytes: a small file could then fill an output of any size."""
    places = sorted((s.file, s.offset, s.length, entry.key) for entry in entries for s in entry.shards)
    for (file, offset, length, _), (next_file, begin, _, key) in itertools.pairwise(places):
        if file == next_file and begin < offset + length:
            raise CorruptCheckpointError(
                f"{folder.path(file)}: the shard of {key} begins at byte {begin}, within the one before it"
            )


def _block_of(entry: Entry, shard: Shard, content: Any) -> tuple[Block, tuple[int, ...] | None]:
    """Return where a shard lies in its tensor and in its file, and the strides of a shard that is not row-major."""
    if not isinstance(content, StoredTensor):
        raise CorruptCheckpointError(f"{shard.file}: the shard of {entry.key} at byte {shard.offset} is no tensor")
    if (content.dtype, content.shape) != (entry.dtype, shard.sizes):
        raise CorruptCheckpointError(
            f"{shard.file}: the shard of {entry.key} is {content.dtype} of the shape {list(content.shape)}, "
            f"the metadata say {entry.dtype} of {list(shard.sizes)}"
        )
    strides = None if content.is_row_major else content.strides
    if strides is not None and len(entry.shards) > 1:
        raise CheckpointError(
            f"{shard.file}: a shard of {entry.key} has the strides {list(strides)}; ort_zero reads shards whose rows "
            "lie one after the other: call contiguous() on the parameter before the save"
        )
    return Block(shard.offsets, shard.sizes, shard.file, shard.offset + content.offset), strides
