"""Read the pickle ``.metadata``: keys, shapes and places of shards, without importing what the pickle names.

The classes are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.2 to 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.restricted_pickle.values import MalformedPickleError, OpaqueObject, TorchConstant
from ort_zero.checkpoint.torch_file import read_pickle_of
from ort_zero.errors import CheckpointError, CorruptCheckpointError

NAME = ".metadata"
_MAX_BYTES = 1 << 30
"""Maximum size of ``.metadata``: a million shards take about 200 MB."""
Numbers = tuple[int, ...]


class Shard(NamedTuple):
    """A block of a tensor, or a pickled value, and the place of its bytes."""

    offsets: Numbers
    """Index of the block's first element along each axis."""
    sizes: Numbers
    file: str
    offset: int
    """Bytes from the start of the file to the shard's zip of ``torch.save``."""
    length: int
    """Bytes of the zip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor or another value of the saved state dict."""

    key: str
    path: tuple[str | int, ...]
    """Keys of the nested dicts and lists that lead to the value."""
    dtype: str | None
    """Name of torch's dtype; None for a value that is no tensor."""
    shape: Numbers
    shards: tuple[Shard, ...]


def read_metadata(folder: Folder) -> list[Entry]:
    """Return the entries of the checkpoint in `folder`, in the order of the saved state dict."""
    path = folder.path(NAME)
    content, _ = read_pickle_of(path, folder.read(NAME, limit=_MAX_BYTES), {}, _no_tensor)
    try:
        fields = _fields(content, "Metadata")
        places = dict(_places(folder, fields["storage_data"]))
        paths, entries = fields.get("planner_data"), fields["state_dict_metadata"]
        paths = paths if isinstance(paths, dict) else {}
        # torch writes the metadata by rank: the weights that rank 0 wrote come first
        order = [*(key for key in paths if key in entries), *(key for key in entries if key not in paths)]
        return [_entry(folder, key, entries[key], places, paths) for key in order]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is not what torch writes ({type(error).__name__}: {error})") from None


def _no_tensor(_: object) -> None:
    raise MalformedPickleError("it holds a tensor, which metadata never do")


def _fields(record: Any, class_name: str) -> Mapping[str, Any]:
    """Return the attributes of a record of one of torch's dataclasses."""
    if not isinstance(record, OpaqueObject) or record.class_name.rpartition(".")[2] != class_name:
        raise TypeError(f"a {class_name} is needed, not {record!r}"[:200])
    if not isinstance(record.state, dict):
        raise TypeError(f"a {class_name} has no attributes")
    return record.state


def _places(folder: Folder, storage: Any) -> Iterator[tuple[tuple[str, Numbers | None], tuple[str, int, int]]]:
    """Yield ((key, offsets), (file, offset, length)) of each shard and value."""
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
            raise CorruptCheckpointError(f"{folder.path(NAME)} names a file {ascii(file)[:100]}, which is none of it")
        if any(type(n) is not int or n < 0 for n in (offset, length)):
            raise ValueError(f"the place of {at['fqn']!r} is no number of bytes")
        offsets = at.get("offset")
        yield (at["fqn"], None if offsets is None else _numbers(offsets)), (file, offset, length)


def _numbers(value: Any) -> Numbers:
    if not isinstance(value, tuple) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r} is no shape"[:200])
    return value


def _entry(
    folder: Folder, key: str, described: Any, places: Mapping[Any, tuple[str, int, int]], paths: Mapping[str, Any]
) -> Entry:
    path = paths.get(key)
    path = path if isinstance(path, tuple) and all(type(part) in (str, int) for part in path) else (key,)
    if not key.isprintable():  # control characters can make a terminal show another text
        raise ValueError(f"a key is {ascii(key)[:200]}")
    if isinstance(described, OpaqueObject) and described.class_name.endswith(".BytesStorageMetadata"):
        return Entry(key=key, path=path, dtype=None, shape=(), shards=(Shard((), (), *places[key, None]),))
    fields = _fields(described, "TensorStorageMetadata")
    shape = _numbers(fields["size"])
    shards = []
    for chunk in fields["chunks"]:
        block = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(block["offsets"]), _numbers(block["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a shard of {key} has another number of axes than the tensor")
        if (key, offsets) not in places:
            raise CorruptCheckpointError(f"{folder.path(NAME)} names no file for the shard of {key} at {offsets}")
        shards.append(Shard(offsets, sizes, *places[key, offsets]))
    return Entry(key=key, path=path, dtype=_dtype(key, fields["properties"]), shape=shape, shards=tuple(shards))


def _dtype(key: str, properties: Any) -> str:
    """Return the dtype's name from a TensorProperties, pickled as a tuple that begins with the dtype."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, TorchConstant) or not dtypes.is_dtype_name(dtype.name):
        raise ValueError(f"the dtype of {key} is {dtype!r}")
    return dtype.name
