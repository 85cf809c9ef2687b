"""Write one shard: a safetensors file of live tensors, hashed while it is written, never copied whole."""

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

BLOCK = 512 << 10
"""Number of bytes that are hashed and written at a time: the kernel copies them from the processor's cache.

A write ends at a multiple of `BLOCK` in the file: the kernel caches aligned writes to a file in larger pages.
"""
MAX_BUFFERS = 1000
"""Maximum number of buffers of one write; the kernel accepts 1024."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPiece:
    """A piece on disk, with the name, kind and dtype of its tensor."""

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
        folder: folder of the checkpoint.
        name: final name of the file.
        entries: content of the file; wider dtypes are written first, so that every tensor is aligned to its dtype.
        metadata: metadata of the header.
        token: id of the save, part of the partial name.
        durable: flush the file to the disk at the end.

    Returns:
        The record of the file, and the pieces in the file.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission), or holds more tensors than a header can
            name; the file is removed.
    """
    ordered = sorted(entries, key=lambda e: -e.tensor.element_size())
    header, size = _header(ordered, metadata)
    file_hash = xxhash.xxh3_128(header)
    written = []
    position = len(header)
    with folder.writing(name, token, durable, size) as stream:
        unwritten = [memoryview(header)]
        for entry in ordered:
            piece_hash = xxhash.xxh3_64()
            end = position
            for block in _blocks(entry.tensor, position):
                piece_hash.update(block)
                file_hash.update(block)
                unwritten.append(block)
                end += len(block)
                if end % BLOCK == 0 or len(unwritten) == MAX_BUFFERS:
                    stream.writelines(unwritten)
                    unwritten = []
            piece = Piece(name, position, entry.nbytes, entry.start, piece_hash.hexdigest())
            written.append(
                WrittenPiece(name=entry.name, kind=entry.kind, dtype=dtypes.code_of(entry.tensor.dtype), piece=piece)
            )
            position += entry.nbytes
        stream.writelines(unwritten)
    return File(name=name, size=size, xxh3_128=file_hash.hexdigest()), written


def _header(entries: Sequence[ShardEntry], metadata: dict[str, str]) -> tuple[bytes, int]:
    """Return the header of a shard, and the size of the whole file in bytes."""
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
    """Yield the bytes of a 1-D tensor: views of CPU memory, or copies from a device one chunk at a time.

    Args:
        tensor: the elements.
        position: bytes from the start of the file; no block crosses a multiple of :data:`BLOCK` in the file.
    """
    step = tensor.numel() if tensor.device.type == "cpu" else CHUNK // tensor.element_size()
    for start in range(0, tensor.numel(), max(1, step)):
        data = tensor[start : start + step].detach().cpu().view(torch.uint8).numpy().data
        begin = 0
        while begin < len(data):
            end = begin + BLOCK - position % BLOCK
            block = data[begin:end]
            yield block
            begin += len(block)
            position += len(block)
