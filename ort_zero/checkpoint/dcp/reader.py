"""Open a checkpoint of ``torch.distributed.checkpoint``, or files of single ranks, without the tensors' data.

The classes in the pickle ``.metadata``, which is read without importing what it names, are those of
``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.2 to 2.13).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ort_zero.checkpoint.dcp import names, rank_files, safetensors_shards
from ort_zero.checkpoint.dcp.assembly import CheckpointContents, source_of
from ort_zero.checkpoint.dcp.blocks import Block
from ort_zero.checkpoint.dcp.names import KeyPath, Value, meanings
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import Shape, Source
from ort_zero.checkpoint.restricted_pickle.values import MalformedPickleError, OpaqueObject, StoredTensor, TorchConstant
from ort_zero.checkpoint.torch_file import Contents, open_torch_file, read_number, read_pickle_of, read_records
from ort_zero.errors import CheckpointError, CorruptCheckpointError

METADATA = ".metadata"
_MAX_BYTES = 1 << 30
"""Maximum size of ``.metadata``: a million shards take about 200 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor or another value of the saved state dict."""

    key: str
    path: KeyPath
    dtype: str | None
    """Name of torch's dtype; None for a value that is no tensor."""
    shape: Shape
    shards: tuple[Block, ...]
    """Each begins at its zip of ``torch.save``; a value that is no tensor has one."""


def read_metadata(folder: Folder) -> list[Entry]:
    """Return the entries of the checkpoint in `folder`, in the order of the saved state dict."""
    path = folder.path(METADATA)
    data = folder.read(METADATA, limit=_MAX_BYTES)
    content, _ = read_pickle_of(path, data, {}, _no_tensor, malformed=CorruptCheckpointError)
    try:
        fields = _fields(content, "Metadata")
        places = dict(_places(folder, fields["storage_data"]))
        paths, entries = fields.get("planner_data"), fields["state_dict_metadata"]
        paths = paths if isinstance(paths, dict) else {}
        # torch writes the metadata by rank: the weights that rank 0 wrote come first
        order = [*(key for key in paths if key in entries), *(key for key in entries if key not in paths)]
        return [_described(folder, key, entries[key], places, paths) for key in order]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is not what torch writes ({type(error).__name__}: {error})") from None


def _no_tensor(_: object) -> None:
    raise MalformedPickleError("it holds a tensor, which metadata never do")


def _fields(record: Any, class_name: str) -> Mapping[str, Any]:
    if not isinstance(record, OpaqueObject) or record.class_name.rpartition(".")[2] != class_name:
        raise TypeError(f"a {class_name} is needed, not {record!r}"[:200])
    if not isinstance(record.state, dict):
        raise TypeError(f"a {class_name} has no attributes")
    return record.state


def _places(folder: Folder, storage: Any) -> Iterator[tuple[tuple[str, Shape | None], tuple[str, int, int]]]:
    """Yield key and offsets of each shard, and the file, offset and length where its bytes lie; of each value too."""
    for index, info in storage.items():
        at, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if place.get("transform_descriptors"):
            kinds = ", ".join(map(str, place["transform_descriptors"]))
            raise CheckpointError(
                f"{folder.path(place['relative_path'])} holds shards that a storage extension has changed ({kinds}); "
                "load it with torch.distributed.checkpoint and that extension, and save it again without"
            )
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        if not isinstance(file, str) or not all(is_plain_name(part) for part in file.split("/")):
            raise CorruptCheckpointError(f"{folder.path(METADATA)} names the file {ascii(file)[:100]}")
        if any(type(n) is not int or n < 0 for n in (offset, length)):
            raise ValueError(f"the place of {at['fqn']!r} is no number of bytes")
        offsets = at.get("offset")
        yield (at["fqn"], None if offsets is None else _numbers(offsets)), (file, offset, length)


def _numbers(value: Any) -> Shape:
    if not isinstance(value, tuple) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r} is no shape"[:200])
    return value


def _described(
    folder: Folder, key: str, described: Any, places: Mapping[Any, tuple[str, int, int]], paths: Mapping[str, Any]
) -> Entry:
    path = paths.get(key)
    path = path if isinstance(path, tuple) and all(type(part) in (str, int) for part in path) else (key,)
    if not key.isprintable():  # control characters can make a terminal show another text
        raise ValueError(f"a key is {ascii(key)[:200]}")
    if isinstance(described, OpaqueObject) and described.class_name.endswith(".BytesStorageMetadata"):
        return Entry(key=key, path=path, dtype=None, shape=(), shards=(Block((), (), *places[key, None]),))
    fields = _fields(described, "TensorStorageMetadata")
    shape = _numbers(fields["size"])
    shards = []
    for chunk in fields["chunks"]:
        block = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(block["offsets"]), _numbers(block["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a shard of {key} has another number of axes than the tensor")
        if (key, offsets) not in places:
            raise CorruptCheckpointError(f"{folder.path(METADATA)} names no file for the shard of {key} at {offsets}")
        shards.append(Block(offsets, sizes, *places[key, offsets]))
    return Entry(key=key, path=path, dtype=_dtype(key, fields["properties"]), shape=shape, shards=tuple(shards))


def _dtype(key: str, properties: Any) -> str:
    """Return the dtype's name from a TensorProperties, pickled as a tuple that begins with the dtype."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, TorchConstant) or not dtypes.is_dtype_name(dtype.name):
        raise ValueError(f"the dtype of {key} is {dtype!r}")
    return dtype.name


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
    return name == METADATA or name.endswith(SUFFIX)


def entries_of(folder: Folder) -> list[Entry]:
    """Return the entries of all parts of a checkpoint; their files are relative to `folder`."""
    entries = []
    for part in part_names(folder):
        inner = folder.child(part) if part else folder
        if not inner.exists(METADATA):
            raise CorruptCheckpointError(f"{inner.path(METADATA)} is missing: the save was interrupted")
        for entry in read_metadata(inner):
            shards = (shard._replace(file=f"{part}/{shard.file}".lstrip("/")) for shard in entry.shards)
            path = entry.path if part.startswith(_MODEL) or not part else (part, *entry.path)
            entries.append(replace(entry, path=path, shards=tuple(shards)))
    return entries


def metadata_files(folder: Folder) -> list[str]:
    return [f"{part}/{METADATA}".lstrip("/") for part in part_names(folder)]


def surplus_files(source: Source, folder: Folder) -> list[str]:
    """Return the files of shards that the metadata do not name."""
    listed = [f"{part}/{name}".lstrip("/") for part in part_names(folder) for name in folder.child(part).names()]
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
            raise CorruptCheckpointError(f"{folder.path(file)}: the shard of {key} at byte {begin} overlaps another")


def _block_of(entry: Entry, shard: Block, content: Any) -> tuple[Block, Shape | None]:
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
    return shard._replace(offset=shard.offset + content.offset), strides
