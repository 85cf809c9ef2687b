"""Writes one shard: a safetensors file made from live tensors, hashed while it is written, never copied whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ort_zero.checkpoint.files import dtypes, safetensors_header
from ort_zero.checkpoint.files.safetensors_header import HeaderEntry
from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.records import MASTER, WEIGHT, File, Piece
from ort_zero.errors import CheckpointError

_BLOCK = 512 << 10
"""Number of bytes that are hashed and written at a time: the kernel copies them from the processor's cache.

A write ends at a multiple of it in the file, since a page of the file's cache is as large as its position is aligned.
"""
_MOST_BUFFERS = 1000
"""Maximum number of buffers of one write; the kernel takes 1024."""


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
        """Name in the safetensors header: masters and weights by their own, others as ``kind/name``."""
        return self.name if self.kind in (MASTER, WEIGHT) else f"{self.kind}/{self.name}"

    @property
    def nbytes(self) -> int:
        """Bytes that the range takes in the file."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPiece:
    """A piece that is on disk, and the tensor it is a piece of."""

    name: str
    kind: str
    dtype: str
    piece: Piece


def write_shard(
    folder: Folder,
    name: str,
    entries: Sequence[ShardEntry],
    metadata: dict[str, str],
    token: str,
    durable: bool = False,
) -> tuple[File, list[WrittenPiece]]:
    """Write a safetensors file under its partial name; :meth:`Folder.publish` with `token` makes it visible.

    Args:
        folder: where.
        name: final name of the file.
        entries: what it holds; wider types are put first, so that every tensor is aligned to its type.
        metadata: goes into the header.
        token: tells this save from others.
        durable: have the bytes on the disk itself at the end.

    Returns:
        The record of the file, and one of each piece in it.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission), or holds more tensors than a header can
            name; nothing is left of it.
    """
    ordered = sorted(entries, key=lambda e: -e.tensor.element_size())
    header, size = _header(ordered, metadata)
    whole = xxhash.xxh3_128(header)
    written = []
    position = len(header)
    with folder.writing(name, token, durable, size) as stream:
        unwritten = [memoryview(header)]
        for entry in ordered:
            own = xxhash.xxh3_64()
            end = position
            for block in _blocks(entry.tensor, position):
                own.update(block)
                whole.update(block)
                unwritten.append(block)
                end += len(block)
                if end % _BLOCK == 0 or len(unwritten) == _MOST_BUFFERS:
                    stream.writelines(unwritten)
                    unwritten = []
            piece = Piece(name, position, entry.nbytes, entry.start, own.hexdigest())
            written.append(
                WrittenPiece(name=entry.name, kind=entry.kind, dtype=dtypes.code_of(entry.tensor.dtype), piece=piece)
            )
            position += entry.nbytes
        stream.writelines(unwritten)
    return File(name=name, size=size, xxh3_128=whole.hexdigest()), written


def _header(entries: Sequence[ShardEntry], metadata: dict[str, str]) -> tuple[bytes, int]:
    """Return the header of a shard and the bytes of the whole file."""
    rows, position = [], 0
    for entry in entries:
        try:
            code = dtypes.code_of(entry.tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f'{entry.key}: {error}; set "checkpoint": {{"sharded": false}}') from None
        rows.append(HeaderEntry(entry.key, code, (entry.tensor.numel(),), position, entry.nbytes))
        position += entry.nbytes
    header = safetensors_header.encode(rows, metadata, 'set "checkpoint": {"sharded": false}')
    return header, len(header) + position


def _blocks(tensor: torch.Tensor, position: int) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D tensor as views where it lies in CPU memory, else as copies of one chunk at a time.

    Args:
        tensor: the elements.
        position: where they begin in the file, in bytes; no block goes beyond a multiple of :data:`_BLOCK` there.
    """
    step = tensor.numel() if tensor.device.type == "cpu" else CHUNK // tensor.element_size()
    for start in range(0, tensor.numel(), max(1, step)):
        data = tensor[start : start + step].detach().cpu().view(torch.uint8).numpy().data
        begin = 0
        while begin < len(data):
            end = begin + _BLOCK - position % _BLOCK
            block = data[begin:end]
            yield block
            begin += len(block)
            position += len(block)
