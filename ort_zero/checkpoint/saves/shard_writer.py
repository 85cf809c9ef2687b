"""Write one shard: a safetensors file of live tensors, hashed while it is written, never copied whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from ort_zero.checkpoint.files import dtypes, safetensors_header
from ort_zero.checkpoint.files.safetensors_header import HeaderEntry
from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.pieces import PieceRun
from ort_zero.checkpoint.records import MASTER, WEIGHT, File
from ort_zero.errors import CheckpointError

BLOCK = 512 << 10
"""Number of bytes that are hashed and written at a time: the kernel copies them from the processor's cache.

A write ends at a multiple of `BLOCK` in the file: the kernel caches aligned writes to a file in larger pages.
"""
MAX_BUFFERS = 1000
"""Maximum number of buffers of one write; the kernel accepts 1024."""
_WAY_OUT = 'set "checkpoint": {"sharded": false}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A range of elements of one tensor, as it lies in this rank's memory."""

    name: str
    kind: str
    start: int
    """First element in the flattened tensor."""
    tensor: torch.Tensor
    """The elements, 1-D and contiguous, on any device."""

    @property
    def key(self) -> str:
        """Key in the safetensors header: the name of masters and weights, ``kind/name`` of others."""
        return self.name if self.kind in (MASTER, WEIGHT) else f"{self.kind}/{self.name}"

    @property
    def nbytes(self) -> int:
        """Size of the range in the file, in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


class Written(NamedTuple):
    """A range of elements of one tensor, as it lies in a file."""

    kind: str
    name: str
    dtype: str
    run: PieceRun
    """One piece; its file is an index among the files of the rank."""


def write_shard(
    folder: Folder,
    name: str,
    entries: Sequence[ShardEntry],
    metadata: dict[str, str],
    token: str,
    durable: bool = False,
    index: int = 0,
) -> tuple[File, list[Written]]:
    """Write a safetensors file under its partial name; :meth:`Folder.publish` with `token` makes it visible.

    Args:
        entries: content of the file; wider dtypes are written first, so that every tensor is aligned to its dtype.
        index: index of the file among the files of the rank.

    Returns:
        The record of the file, and the ranges of tensors in the file.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission), or holds more tensors than a header can
            name; the file is removed.
    """
    ordered = sorted(entries, key=lambda e: -e.tensor.element_size())
    rows, position = [], 0
    for entry in ordered:
        try:
            code = dtypes.code_of(entry.tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{entry.key}: {error}; {_WAY_OUT}") from None
        rows.append(HeaderEntry(entry.key, code, (entry.tensor.numel(),), position, entry.nbytes))
        position += entry.nbytes
    header = safetensors_header.encode(rows, metadata, _WAY_OUT)
    size = len(header) + position
    file_hash = xxhash.xxh3_128(header)
    written = []
    with folder.writing(name, token, durable, size) as stream:
        unwritten = [memoryview(header)]
        for entry, row in zip(ordered, rows):
            piece_hash = xxhash.xxh3_64()
            end = start = len(header) + row.offset
            for block in _blocks(entry.tensor, start):
                piece_hash.update(block)
                file_hash.update(block)
                unwritten.append(block)
                end += len(block)
                if end % BLOCK == 0 or len(unwritten) == MAX_BUFFERS:
                    stream.writelines(unwritten)
                    unwritten = []
            run = PieceRun(index, start, row.nbytes, entry.start, piece_hash.digest())
            written.append(Written(entry.kind, entry.name, row.dtype, run))
        stream.writelines(unwritten)
    return File(name=name, size=size, xxh3_128=file_hash.hexdigest()), written


def _blocks(tensor: torch.Tensor, position: int) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D tensor: views of CPU memory, or copies from a device one chunk at a time.

    No block crosses a multiple of :data:`BLOCK` in the file, in which the tensor begins at byte `position`.
    """
    step = tensor.numel() if tensor.device.type == "cpu" else CHUNK // tensor.element_size()
    for start in range(0, tensor.numel(), max(1, step)):
        data = tensor[start : start + step].detach().cpu().view(torch.uint8).numpy().data
        begin = 0
        while begin < len(data):
            block = data[begin : begin + BLOCK - position % BLOCK]
            yield block
            begin += len(block)
            position += len(block)
