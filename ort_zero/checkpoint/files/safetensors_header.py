"""Encode and read the header of a safetensors file, for shards and aggregated files.

Eight bytes of length (little endian), then JSON with one entry per tensor, then spaces up to a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Maximum length in bytes of a header's JSON: the safetensors library refuses a longer one."""
_METADATA = "__metadata__"


class HeaderEntry(NamedTuple):
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    dtype: str
    """The dtype's code in safetensors: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the data section."""
    nbytes: int


def encode(entries: Iterable[HeaderEntry], metadata: Mapping[str, str], advice: str) -> bytes:
    """Return the bytes of a header, with its length; `advice` is the way out for too many tensors."""
    table: dict[str, Any] = {_METADATA: metadata}
    for name, dtype, shape, offset, nbytes in entries:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"too many tensors for one file of safetensors, {advice}")
    return len(text).to_bytes(8, "little") + text


class Header(NamedTuple):
    """The content of a file's header."""

    size: int
    metadata: dict[str, Any]
    entries: dict[str, HeaderEntry]
    """The tensors by name; their offsets count from the start of the file."""


def read(folder: Folder, name: str) -> Header:
    size = folder.size(name)
    if size is None:
        raise CorruptCheckpointError(f"{folder.path(name)} is missing")
    length = int.from_bytes(folder.read(name, 0, 8), "little")
    try:
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header cannot have {length} bytes")
        table = json_text.loads(folder.read(name, 8, length))
        metadata = table.pop(_METADATA, {})
        if not isinstance(metadata, dict):
            raise TypeError("its metadata is no table")
        entries = {}
        for key, about in table.items():
            begin, end = about["data_offsets"]
            if not (0 <= begin <= end <= size - 8 - length):
                raise ValueError(f"tensor {key} lies outside of the file")
            dtype, shape, nbytes = about["dtype"], tuple(about["shape"]), end - begin
            if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * itemsize(dtype) != nbytes:
                raise ValueError(f"{key} has {nbytes} bytes, its shape is {list(shape)} of {dtype}")
            entries[key] = HeaderEntry(key, dtype, shape, 8 + length + begin, nbytes)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{folder.path(name)} is damaged: its header is none ({error})") from None
    except (CheckpointError, ValueError) as error:
        raise CorruptCheckpointError(f"{folder.path(name)} is damaged: {error}") from None
    return Header(size, metadata, entries)
