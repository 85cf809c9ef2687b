"""Open a checkpoint of ``torch.distributed.checkpoint``, or files of single ranks, without the tensors' data.

The classes in the pickle ``.metadata``, which is read without importing what it names, are those of
``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.2 to 2.13).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ort_zero.checkpoint.dcp import names, rank_files, safetensors_shards
from ort_zero.checkpoint.dcp.assembly import CheckpointContents, Entry, source_of
from ort_zero.checkpoint.dcp.blocks import Block, shape_of
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.restricted_pickle.values import MalformedPickleError, OpaqueObject, StoredTensor, TorchConstant
from ort_zero.checkpoint.torch_file import Contents, open_torch_file, read_pickle_of, read_records
from ort_zero.errors import CheckpointError, CorruptCheckpointError

METADATA = ".metadata"
SUFFIX = ".distcp"
_MAX_BYTES = 1 << 30
"""Maximum size of ``.metadata``: a million shards take about 200 MB."""
_MODEL = "pytorch_model_fsdp_"
_OF_ACCELERATE = re.compile(rf"({_MODEL}|optimizer_)\d+")
"""The folders of ``accelerator.save_state`` and of the Trainer under FSDP."""
_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def recognises(folder: Folder) -> bool:
    """Return True if the folder holds a checkpoint that :func:`open_dcp` opens, or one whose save was interrupted."""
    listed = folder.names()
    return bool(part_names(folder) or rank_files.files_by_kind(listed) or safetensors_shards.file_names(folder, listed))


def part_names(folder: Folder) -> list[str]:
    """Return the paths of the inner folders that make up the checkpoint in `folder`: "" for the folder itself."""
    if _is_of_torch(folder):
        return [""]
    parts = [
        f"{name}/" for name in folder.names() if _OF_ACCELERATE.fullmatch(name) and _is_of_torch(folder.child(name))
    ]
    # of several models each is a checkpoint of its own: the user says which
    return parts if sum(part.startswith(_MODEL) for part in parts) < 2 else []


def _is_of_torch(folder: Folder) -> bool:
    return any(name == METADATA or name.endswith(SUFFIX) for name in folder.names())


def metadata_files(folder: Folder) -> list[str]:
    return [part + METADATA for part in part_names(folder)]


def surplus_files(source: Source, folder: Folder) -> list[str]:
    """Return the files of shards that the metadata do not name."""
    listed = [part + name for part in part_names(folder) for name in folder.child(part).names()]
    return [name for name in listed if name.endswith(SUFFIX) and name not in source.files]


def open_dcp(folder: Folder) -> Source:
    """Return the checkpoint in `folder`, having checked that its shards cover each tensor once."""
    contents = CheckpointContents(folder)
    if part_names(folder):
        _read_shards(contents)
    elif rank_files.files_by_kind(folder.names()):
        rank_files.read_rank_files(contents)
    else:
        safetensors_shards.read_shards(contents)
    return source_of(contents)


def _read_shards(contents: CheckpointContents) -> None:
    folder = contents.folder
    entries = [entry for part in part_names(folder) for entry in _read_metadata(folder, part)]
    zips = [(block, entry.key) for entry in entries for block in entry.blocks.values()]
    zips.sort(key=lambda pair: pair[0][2:5])
    for (before, _), (block, key) in itertools.pairwise(zips):
        # a small file could otherwise fill an output of any size
        if before.file == block.file and block.offset < before.offset + before.length:
            path = folder.path(block.file)
            raise CorruptCheckpointError(f"{path}: the shard of {key} at byte {block.offset} overlaps another")
    ranks = {match[1] for block, _ in zips if (match := _RANK.fullmatch(block.file))}
    contents.world_size, contents.copies_tied = len(ranks) or 1, True
    cache: Contents = {}
    for entry, meaning in zip(entries, names.meanings([entry.path for entry in entries])):
        blocks, entry.blocks = entry.blocks, {}
        value = None
        for block in blocks.values():
            records = contents.records.setdefault(block.file, set())
            if meaning.kind == names.OTHER:
                records.update(read_records(folder, block.file, block.offset, block.length))
                continue
            opened = open_torch_file(folder, block.file, cache=cache, start=block.offset, length=block.length)
            records.update(opened.file.records)
            value = opened.content
            if entry.dtype is not None:
                entry.add(folder, opened, _checked(value, entry, block), block.offsets)
        if entry.dtype is not None or meaning.kind == names.OTHER:
            contents.entries.append(entry)
        else:
            contents.entries += [Entry(path, value=leaf) for path, leaf in names.leaves(value, entry.path)]


def _checked(stored: Any, entry: Entry, block: Block) -> StoredTensor:
    """Return the tensor of a shard, which is as the metadata describe it."""
    if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != (entry.dtype, block.sizes):
        what = f"{stored.dtype} of the shape {list(stored.shape)}" if isinstance(stored, StoredTensor) else "no tensor"
        raise CorruptCheckpointError(
            f"{block.file}: the shard of {entry.key} at byte {block.offset} is {what}, "
            f"the metadata say {entry.dtype} of {list(block.sizes)}"
        )
    return stored


def _read_metadata(folder: Folder, part: str) -> list[Entry]:
    """Return what the metadata in an inner folder list, in the order of the saved state dict.

    Each block begins at its zip of ``torch.save``; a value that is no tensor has one block.
    """
    path = folder.path(part + METADATA)
    if not folder.exists(part + METADATA):
        raise CorruptCheckpointError(f"{path} is missing: the save was interrupted")
    data = folder.read(part + METADATA, limit=_MAX_BYTES)
    content, _ = read_pickle_of(path, data, {}, _no_tensor, malformed=CorruptCheckpointError)
    try:
        fields = content.state
        places = dict(_places(folder, part, fields["storage_data"]))
        paths, described = fields.get("planner_data"), fields["state_dict_metadata"]
        paths = paths if isinstance(paths, dict) else {}
        # torch writes the metadata by rank: the weights that rank 0 wrote come first
        order = [*(key for key in paths if key in described), *(key for key in described if key not in paths)]
        entries = [_entry(key, described[key], places, paths.get(key)) for key in order]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is not what torch writes ({type(error).__name__}: {error})") from None
    if part and not part.startswith(_MODEL):
        for entry in entries:
            entry.path = (part.rstrip("/"), *entry.path)
    return entries


def _no_tensor(_: object) -> None:
    raise MalformedPickleError("it holds a tensor, which metadata never do")


def _places(folder: Folder, part: str, storage: Any) -> Iterator[tuple[tuple[str, Any], tuple[str, int, int]]]:
    """Yield ((key, offsets), (file, offset, length)) of each shard or value: what it is, and where its bytes lie."""
    for index, info in storage.items():
        at, place = index.state, info.state
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        if place.get("transform_descriptors"):
            kinds = ", ".join(map(str, place["transform_descriptors"]))
            raise CheckpointError(
                f"{folder.path(part)}{file} holds shards that a storage extension has changed ({kinds}); load it with "
                "torch.distributed.checkpoint and that extension, and save it again without"
            )
        if not isinstance(file, str) or not all(is_plain_name(name) for name in file.split("/")):
            raise ValueError(f"it names the file {ascii(file)[:100]}")
        shape_of((offset, length))
        yield (at["fqn"], at.get("offset")), (part + file, offset, length)


def _entry(key: str, described: Any, places: Mapping[Any, tuple[str, int, int]], path: Any) -> Entry:
    if not isinstance(path, tuple) or any(type(part) not in (str, int) for part in path):
        path = (key,)
    if not key.isprintable():  # control characters can make a terminal show another text
        raise ValueError(f"a key is {ascii(key)[:200]}")
    if isinstance(described, OpaqueObject) and described.class_name.endswith(".BytesStorageMetadata"):
        return Entry(path, blocks={(): Block((), (), *places[key, None])})
    fields = described.state
    properties = fields["properties"].state  # pickled as a tuple that begins with the dtype
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, TorchConstant) or not dtypes.is_dtype_name(dtype.name):
        raise ValueError(f"the dtype of {key} is {dtype!r}")
    entry = Entry(path, dtype.name, shape_of(fields["size"]))
    for chunk in fields["chunks"]:
        block = chunk.state
        offsets, sizes = shape_of(block["offsets"]), shape_of(block["sizes"])
        if (key, offsets) not in places:
            raise ValueError(f"it names no file for the shard of {key} at {offsets}")
        entry.blocks[offsets] = Block(offsets, sizes, *places[key, offsets])
    return entry
